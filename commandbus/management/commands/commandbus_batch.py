from __future__ import annotations

import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from commandbus.ids import uuid7
from commandbus.messages import BatchCommand, BatchStatus
from commandbus.shell import arguments, batch_actions
from commandbus.shell.batch_files import BatchFile, create
from commandbus.shell.batch_watch import watch
from commandbus.shell.batches import show_batch, show_list
from commandbus.shell.recipe import Recipe
from commandbus.shell.source import STDIN


class Command(BaseCommand):
    help = "Make batches of commands, look at them, and watch, cancel, retry, seal or repair them."

    def add_arguments(self, parser: CommandParser) -> None:
        action = arguments.with_actions(parser)
        _add_file(action("create", "a batch of the commands of a file: all of them, or nothing; prints its id"))

        listing = action("list", "the batches of a domain, the newest first")
        listing.add_argument("domain")
        statuses = [status.value for status in BatchStatus]
        listing.add_argument("--status", type=str.upper, choices=statuses, help="only those")
        listing.add_argument("--limit", type=arguments.positive, default=50, help="show so many (50)")
        listing.add_argument("--json", action="store_true")

        showing = action("show", "one batch: its counts, its data, what has failed, its history")
        _add_batch(showing)
        showing.add_argument("--json", action="store_true")

        _add_batch(
            action(
                "watch",
                "one batch, until it completes; the exit code is 0 for COMPLETED, 1 for COMPLETED_WITH_FAILURES or an "
                "error, 130 after Ctrl-C",
            )
        )

        canceling = action("cancel", "seal a batch and end its commands that wait; what runs goes on")
        _add_batch(canceling)
        canceling.add_argument("--troubleshooting", action="store_true", help="also what is in troubleshooting")
        arguments.add_audit(canceling, reason_required=True)

        retrying = action("retry", "send commands of a batch again that are in the Troubleshooting Queue")
        _add_batch(retrying)
        arguments.add_audit(retrying)

        sealing = action("seal", "let a batch complete; nothing can be added any more")
        _add_batch(sealing)
        sealing.add_argument("--allow-incomplete", action="store_true", help="with other commands than were expected")
        arguments.add_operator(sealing)

        repairing = action("repair", "count the commands of batches that are not complete, and correct what differs")
        repairing.add_argument("domain", nargs="?", help="(all)")
        arguments.add_operator(repairing)

    def handle(self, *args: Any, **options: Any) -> None:
        with arguments.plain_errors():
            code = self._act(options)
        if code:
            sys.exit(code)

    def _act(self, options: dict[str, Any]) -> int:
        action, domain, silent = options["action"], options["domain"], options["verbosity"] == 0
        if action == "create":
            return create(_file(options), self.stdout, self.stderr)
        if action == "list":
            status = None if options["status"] is None else BatchStatus(options["status"])
            show_list(domain, status, self.stdout, limit=options["limit"], as_json=options["json"])
        elif action == "show":
            show_batch(domain, options["id"], self.stdout, as_json=options["json"])
        elif action == "watch":
            return watch(domain, options["id"], self.stdout, self.stderr, silent=silent)
        elif action == "cancel":
            troubleshooting = options["troubleshooting"]
            return batch_actions.cancel(_job(options), self.stdout, self.stderr, troubleshooting=troubleshooting)
        elif action == "retry":
            return batch_actions.retry(_job(options), self.stdout, self.stderr)
        elif action == "seal":
            batch_actions.seal(_job(options), self.stdout, allow_incomplete=options["allow_incomplete"])
        else:
            by = options["operator"]
            return batch_actions.repair(domain, self.stdout, self.stderr, operator=by, silent=silent)
        return 0


def _add_batch(parser: ArgumentParser) -> None:
    parser.add_argument("domain")
    parser.add_argument("id", type=arguments.batch_uuid, help="of the batch")


def _add_file(parser: ArgumentParser) -> None:
    parser.add_argument("domain")
    parser.add_argument("file", help="JSON lines or CSV, also with .gz; - for standard input")
    arguments.add_format(parser)
    parser.add_argument("--type", help="of the lines that name none")
    parser.add_argument("--name", help="of the batch")
    parser.add_argument("--custom-data", metavar="JSON", help="kept with the batch; @FILE or - for standard input")
    parser.add_argument("--on-complete-type", metavar="TYPE", help="send a command of this type when it completes")
    parser.add_argument(
        "--on-complete-data",
        metavar="JSON",
        help="the data of that command ({}), which gets a summary of the batch too; @FILE or - for standard input",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, and create nothing")


def _file(options: dict[str, Any]) -> BatchFile:
    if [options["file"], options["custom_data"], options["on_complete_data"]].count(STDIN) > 1:
        raise CommandError("standard input can be read once; give one of the others as a file")
    custom_data = options["custom_data"]
    return BatchFile(
        recipe=Recipe(
            domain=options["domain"],
            command_type=options["type"],
            type_from="with --type",
            id_from=arguments.field_names(options["id_from"], "--id-from"),
        ),
        path=options["file"],
        format=options["format"],
        name=options["name"],
        custom_data=None if custom_data is None else arguments.json_object(custom_data, "--custom-data"),
        on_complete=_on_complete(options),
        dry_run=options["dry_run"],
        silent=options["verbosity"] == 0,
    )


def _on_complete(options: dict[str, Any]) -> BatchCommand | None:
    command_type, data = options["on_complete_type"], options["on_complete_data"]
    if command_type is None:
        if data is not None:
            raise CommandError("--on-complete-data needs --on-complete-type: the type of the command that gets it")
        return None
    body = {} if data is None else arguments.json_object(data, "--on-complete-data")
    return BatchCommand(command_type, uuid7(), body)


def _job(options: dict[str, Any]) -> batch_actions.BatchJob:
    return batch_actions.BatchJob(
        domain=options["domain"],
        batch_id=options["id"],
        operator=options["operator"] or arguments.operator(),
        reason=options.get("reason"),
        dry_run=options.get("dry_run", False),
        yes=options.get("yes", False),
        silent=options["verbosity"] == 0,
    )
