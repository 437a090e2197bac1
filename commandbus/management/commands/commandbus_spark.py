from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from commandbus.shell import arguments
from commandbus.shell.spark import url_of
from commandbus.spark import cli


class Command(BaseCommand):
    help = "Let Spark send commands in millions, to the database of their domain."

    def add_arguments(self, parser: CommandParser) -> None:
        action = arguments.with_actions(parser)
        cli.add_send_arguments(action("send", cli.SEND))

    def handle(self, *args: Any, **options: Any) -> None:
        for stream in (self.stdout, self.stderr):  # a bar has no line end, and is no error
            stream.ending = ""
            stream.style_func = None
        with arguments.plain_errors():
            code = cli.send(options, url_of(options["domain"]), self.stdout, self.stderr)
        if code:
            sys.exit(code)
