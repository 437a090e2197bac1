from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from commandbus.shell.arguments import plain_errors
from commandbus.shell.monitor import show


class Command(BaseCommand):
    help = "Show what the domains have to do, and which processes do it. Quick, however much there is."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("domains", nargs="*", metavar="domain", help="(all)")
        parser.add_argument("--json", action="store_true", help="with --watch, one line each time")
        parser.add_argument(
            "--watch",
            type=float,
            nargs="?",
            const=1.0,
            metavar="SECONDS",
            help="again every so often (1), until Ctrl-C",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["watch"] is not None and not options["watch"] > 0:
            raise CommandError(f"--watch needs a number of seconds above 0, not {options['watch']:g}")
        with plain_errors():
            code = show(options["domains"] or None, self.stdout, as_json=options["json"], every=options["watch"])
        if code:
            sys.exit(code)
