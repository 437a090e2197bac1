from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from commandbus.api import uuid_of
from commandbus.ids import uuid7
from commandbus.messages import NewCommand
from commandbus.shell.arguments import add_format, field_names, json_object, plain_errors
from commandbus.shell.recipe import Recipe
from commandbus.shell.sending import FileJob, send_file, send_one

OF_ONE = ("data", "id", "correlation_id", "reply_to", "delay")
OF_A_FILE = ("format", "id_from", "rejects")


class Command(BaseCommand):
    help = "Send one command, or those of a file. Sending the same again does nothing."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("domain")
        parser.add_argument("type", nargs="?", help="of the command; with --file, of the lines that name none")
        one = parser.add_argument_group("one command")
        one.add_argument("--data", metavar="JSON", help="its data, as an object; @FILE or - for standard input")
        one.add_argument("--id", metavar="UUID", help="its id (a new one)")
        one.add_argument("--correlation-id", metavar="UUID")
        one.add_argument("--reply-to", metavar="QUEUE", help="where the reply goes (the domain's reply queue)")
        one.add_argument("--delay", type=float, metavar="SECONDS", help="let it wait for so long")
        many = parser.add_argument_group("many commands")
        many.add_argument("--file", metavar="FILE", help="JSON lines or CSV, also with .gz; - for standard input")
        add_format(many)
        many.add_argument("--rejects", metavar="FILE", help="write the lines in error there, as they are")
        parser.add_argument("--dry-run", action="store_true", help="check everything, and send nothing")

    def handle(self, *args: Any, **options: Any) -> None:
        _check_together(options)
        with plain_errors():
            code = self._send_one(options) if options["file"] is None else self._send_file(options)
        if code:
            sys.exit(code)

    def _send_one(self, options: dict[str, Any]) -> int:
        command_id = uuid7() if options["id"] is None else uuid_of(options["id"], "--id")
        data = json_object(options["data"], "--data")
        rest = (options["reply_to"], options["correlation_id"], options["delay"])
        send_one(options["domain"], NewCommand(options["type"], command_id, data, *rest), dry_run=options["dry_run"])
        self.stdout.write(f"{command_id} would be sent" if options["dry_run"] else str(command_id))
        return 0

    def _send_file(self, options: dict[str, Any]) -> int:
        fields = field_names(options["id_from"], "--id-from")
        job = FileJob(
            recipe=Recipe(domain=options["domain"], command_type=options["type"], id_from=fields),
            path=options["file"],
            format=options["format"],
            rejects=options["rejects"],
            dry_run=options["dry_run"],
            silent=options["verbosity"] == 0,
        )
        return send_file(job, self.stdout, self.stderr)


def _check_together(options: dict[str, Any]) -> None:
    if (options["file"] is None) == (options["data"] is None):
        raise CommandError("say what to send: either --data '{…}' for one command, or --file FILE for many")
    if options["file"] is None and options["type"] is None:
        raise CommandError("name the type of the command after the domain")
    for name in OF_A_FILE if options["file"] is None else OF_ONE:
        if options[name] is not None:
            other = "--file" if options["file"] is None else "one command; in a file, each line says it"
            raise CommandError(f"--{name.replace('_', '-')} is for {other}")
