from __future__ import annotations

import socket
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from commandbus.exceptions import ConfigurationError
from commandbus.worker.domains import reply_queues_of
from commandbus.worker.log import show_log
from commandbus.worker.options import WorkerOptions
from commandbus.worker.supervisor import Supervisor


class Command(BaseCommand):
    help = (
        "Work off the commands of one or several domains, or their replies, until SIGTERM or SIGINT; "
        "a second signal ends it at once."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("domains", nargs="*", metavar="domain")
        parser.add_argument(
            "--replies", nargs="+", action="extend", default=[], metavar="domain", help="handle the replies of these"
        )
        parser.add_argument("--processes", type=int, default=1, help="worker processes (1)")
        parser.add_argument("--concurrency", type=int, default=10, help="handlers that run at once per process (10)")
        parser.add_argument("--vt", type=int, default=30, help="seconds of a lease (30)")
        parser.add_argument("--no-notify", action="store_true", help="only poll, do not listen for notifications")
        parser.add_argument("--poll-interval", type=float, default=1.0, help="seconds between polls when idle (1)")
        parser.add_argument("--until-empty", action="store_true", help="end when nothing is ready and nothing runs")
        parser.add_argument("--max-commands", type=int, help="replace a process after this many commands")
        parser.add_argument("--max-memory", type=int, help="replace a process that takes more than this many megabytes")
        parser.add_argument(
            "--no-reload", action="store_true", help="under DEBUG, do not replace the processes when code changes"
        )
        parser.add_argument("--name", default=socket.gethostname(), help="the node's name (this host's)")

    def handle(self, *args: Any, **options: Any) -> None:
        show_log(options["verbosity"])
        try:
            supervisor = Supervisor(
                WorkerOptions(
                    domains=(*options["domains"], *reply_queues_of(options["replies"])),
                    concurrency=options["concurrency"],
                    vt=options["vt"],
                    use_notify=not options["no_notify"],
                    poll_interval=options["poll_interval"],
                    until_empty=options["until_empty"],
                    max_commands=options["max_commands"],
                    max_memory=options["max_memory"],
                    name=options["name"],
                ),
                options["processes"],
                reload=settings.DEBUG and not options["no_reload"] and not options["until_empty"],
                verbosity=options["verbosity"],
            )
            code = supervisor.run()
        except ConfigurationError as error:
            raise CommandError(str(error)) from error
        if code:
            sys.exit(code)
