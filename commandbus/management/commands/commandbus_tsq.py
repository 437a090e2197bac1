from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError, CommandParser

from commandbus import ops
from commandbus.shell import arguments
from commandbus.shell.actions import Job, Run, act
from commandbus.shell.troubleshooting import show_command, show_list

FILTER = ("type", "error_type", "error_code", "since", "until")


class Command(BaseCommand):
    help = "Look at the Troubleshooting Queue of a domain, and retry, edit, cancel or complete what is in it."

    def add_arguments(self, parser: CommandParser) -> None:
        action = arguments.with_actions(parser)

        listing = action("list", "what is in it")
        listing.add_argument("domain")
        _add_filter(listing)
        listing.add_argument("--limit", type=arguments.positive, default=50, help="show so many (50)")
        listing.add_argument("--json", action="store_true")

        showing = action("show", "one command: data, last error, history")
        showing.add_argument("domain")
        showing.add_argument("id", type=arguments.uuid)
        showing.add_argument("--json", action="store_true")

        retrying = action("retry", "send commands again, as they are")
        _add_choice(retrying)
        canceling = action("cancel", "end commands; their senders get the reason")
        _add_choice(canceling, reason_required=True)
        completing = action("complete", "end commands as done by other means")
        _add_choice(completing)
        completing.add_argument("--result", metavar="JSON", help="what the sender gets; @FILE or - for standard input")

        editing = action("edit", "send one command again with other data")
        editing.add_argument("domain")
        editing.add_argument("id", type=arguments.uuid)
        editing.add_argument("--data", metavar="JSON", required=True, help="all of it; @FILE or - for standard input")
        arguments.add_audit(editing)

    def handle(self, *args: Any, **options: Any) -> None:
        code = 0
        with arguments.plain_errors():
            if options["action"] == "list":
                limit, as_json = options["limit"], options["json"]
                show_list(options["domain"], _filter(options), self.stdout, limit=limit, as_json=as_json)
            elif options["action"] == "show":
                show_command(options["domain"], options["id"], self.stdout, as_json=options["json"])
            else:
                code = act(_job(options), self.stdout, self.stderr)
        if code:
            sys.exit(code)


def _add_filter(parser: ArgumentParser) -> None:
    chosen = parser.add_argument_group("only those")
    chosen.add_argument("--type", help="of this command type")
    chosen.add_argument("--error-type", help="with an exception of this class")
    chosen.add_argument("--error-code", help="with this code")
    chosen.add_argument("--since", type=arguments.moment, metavar="TIME", help="that came in at this time or later")
    chosen.add_argument("--until", type=arguments.moment, metavar="TIME", help="that came in until this time")


def _add_choice(parser: ArgumentParser, *, reason_required: bool = False) -> None:
    parser.add_argument("domain")
    parser.add_argument("ids", nargs="*", type=arguments.uuid, metavar="ID")
    _add_filter(parser)
    parser.add_argument("--all", action="store_true", help="everything in the Troubleshooting Queue of the domain")
    arguments.add_audit(parser, reason_required=reason_required)


def _filter(options: dict[str, Any]) -> ops.TroubleshootingFilter:
    return ops.TroubleshootingFilter(**{name: options[name] for name in FILTER})


def _choice(options: dict[str, Any]) -> Sequence[UUID] | ops.TroubleshootingFilter:
    """Which commands an action is for."""
    if options["action"] == "edit":
        return [options["id"]]
    which = _filter(options)
    ways = (bool(options["ids"]), which != ops.EVERYTHING, options["all"])
    if sum(ways) != 1:
        raise CommandError(
            f"say which commands to {options['action']}, in one of these ways: their ids; a filter (--type, "
            f"--error-type, --error-code, --since, --until); or --all"
        )
    return options["ids"] or which


def _job(options: dict[str, Any]) -> Job:
    return Job(
        verb=options["action"],
        domain=options["domain"],
        which=_choice(options),
        run=_run(options),
        dry_run=options["dry_run"],
        yes=options["yes"],
        silent=options["verbosity"] == 0,
    )


def _run(options: dict[str, Any]) -> Run:
    domain = options["domain"]
    operator = options["operator"] or arguments.operator()
    by = {"operator": operator, "reason": options["reason"]}
    if options["action"] == "retry":
        return lambda which, progress: ops.operator_retry_many(domain, which, progress=progress, **by)
    if options["action"] == "cancel":
        return lambda which, progress: ops.operator_cancel_many(domain, which, progress=progress, **by)
    if options["action"] == "complete":
        result = None if options["result"] is None else arguments.json_object(options["result"], "--result")
        return lambda which, progress: ops.operator_complete_many(domain, which, result, progress=progress, **by)
    data = arguments.json_object(options["data"], "--data")
    return lambda _, progress: ops.operator_edit_many(domain, {options["id"]: data}, progress=progress, **by)
