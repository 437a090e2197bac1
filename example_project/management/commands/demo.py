from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from example_project.demo import Demo
from example_project.payouts import DemoFailedError


class Command(BaseCommand):
    help = "Show the whole system at work: a worker, the admin, and traffic of every kind."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--once", action="store_true", help="send, work off, print what happened, end")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            Demo(self.stdout).run(once=options["once"])
        except DemoFailedError as error:
            raise CommandError(str(error)) from None
