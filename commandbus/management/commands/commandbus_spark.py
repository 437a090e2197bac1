from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.management.base import BaseCommand, CommandParser, OutputWrapper

from commandbus.shell import arguments
from commandbus.shell.spark import url_of
from commandbus.spark import cli


class Command(BaseCommand):
    help = "Let Spark send commands in millions, to the database of their domain."

    def add_arguments(self, parser: CommandParser) -> None:
        action = arguments.with_actions(parser)
        cli.add_send_arguments(action("send", cli.SEND))

    def handle(self, *args: Any, **options: Any) -> None:
        with _unchanged(self.stdout), _unchanged(self.stderr), arguments.plain_errors():
            code = cli.send(options, url_of(options["domain"]), self.stdout, self.stderr)
        if code:
            sys.exit(code)


@contextmanager
def _unchanged(stream: OutputWrapper) -> Iterator[None]:
    """What is written has no line end but its own, and is no error: it may be a bar."""
    ending, style_func = stream.ending, stream.style_func
    stream.ending, stream.style_func = "", None
    try:
        yield
    finally:
        stream.ending, stream.style_func = ending, style_func
