from __future__ import annotations

import logging
import signal
import socket
import threading
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from commandbus.exceptions import ConfigurationError
from commandbus.worker import Worker, WorkerOptions


class Command(BaseCommand):
    help = "Work off the commands of one or several domains, until SIGTERM or SIGINT."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("domains", nargs="+", metavar="domain")
        parser.add_argument("--concurrency", type=int, default=10, help="handlers that run at once (10)")
        parser.add_argument("--vt", type=int, default=30, help="seconds of a lease (30)")
        parser.add_argument("--no-notify", action="store_true", help="only poll, do not listen for notifications")
        parser.add_argument("--poll-interval", type=float, default=1.0, help="seconds between polls when idle (1)")
        parser.add_argument("--until-empty", action="store_true", help="end when nothing is ready and nothing runs")
        parser.add_argument("--max-commands", type=int, help="end after this many commands")
        parser.add_argument("--name", default=socket.gethostname(), help="the node's name (this host's)")

    def handle(self, *args: Any, **options: Any) -> None:
        _show_log(options["verbosity"])
        try:
            worker = Worker(
                WorkerOptions(
                    domains=tuple(options["domains"]),
                    concurrency=options["concurrency"],
                    vt=options["vt"],
                    use_notify=not options["no_notify"],
                    poll_interval=options["poll_interval"],
                    until_empty=options["until_empty"],
                    max_commands=options["max_commands"],
                    name=options["name"],
                )
            )
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: threading.Thread(target=worker.stop).start())
            worker.run()
        except ConfigurationError as error:
            raise CommandError(str(error)) from error


def _show_log(verbosity: int) -> None:
    """A project that configures no logging shall see what its worker does all the same."""
    logger = logging.getLogger("commandbus")
    if verbosity > 0 and not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO if verbosity == 1 else logging.DEBUG)
