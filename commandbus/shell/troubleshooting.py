"""The Troubleshooting Queue as a table, and one command with all that is known of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, OutputWrapper
from django.utils import timezone

from commandbus import api, ops
from commandbus.messages import AuditEvent
from commandbus.models import Audit, Command
from commandbus.shell.table import age, ago, json_text, moment, shortened
from commandbus.status import AT_MOST
from commandbus.text import number, plain, table

MESSAGE_WIDTH = 50
DETAILS_WIDTH = 100


def show_list(
    domain: str, which: ops.TroubleshootingFilter, out: OutputWrapper, *, limit: int, as_json: bool = False
) -> None:
    """The newest commands first. How many there are in all is counted up to AT_MOST."""
    found = ops.in_troubleshooting(domain, which)
    commands = list(found.order_by("-id")[:limit])
    total = found.order_by()[: AT_MOST + 1].count()
    if as_json:
        body = {"commands": [fields(command) for command in commands], "total": min(total, AT_MOST)}
        out.write(json_text({**body, "more": total > AT_MOST}))
    elif commands:
        out.write("\n".join(rows(commands)))
        out.write(f"\n{number(len(commands))} of {number(min(total, AT_MOST), more=total > AT_MOST)}")
    else:
        out.write(
            f"nothing{'' if which == ops.EVERYTHING else ' like that'} is in the Troubleshooting Queue of {domain}"
        )


def rows(commands: Iterable[Command]) -> list[str]:
    """A table of commands that are in the Troubleshooting Queue."""
    now = timezone.now()
    header = ("ID", "TYPE", "ATTEMPTS", "ERROR", "MESSAGE", "SINCE", "AGE")
    cells = [
        (
            str(command.command_id),
            plain(command.command_type),
            f"{command.attempts}/{command.max_attempts}",
            shortened(command.last_error_code or "", MESSAGE_WIDTH),
            shortened(command.last_error_msg or "", MESSAGE_WIDTH),
            moment(command.updated_at),
            age((now - command.updated_at).total_seconds()),
        )
        for command in commands
    ]
    return table(header, cells, right=[2, 6])


def show_command(domain: str, command_id: UUID, out: OutputWrapper, *, as_json: bool = False) -> None:
    """Raises CommandError if there is none."""
    command = api.get_command(domain, command_id)
    if command is None:
        raise CommandError(f"there is no command {command_id} in domain {domain}; it may have been pruned")
    data = ops.get_payload(domain, command_id)
    audit = api.audit_trail(domain, command_id)
    if as_json:
        body = {"command": fields(command), "data": data, "error": _last_error(audit), "audit": events(audit)}
        out.write(json_text(body))
        return
    out.write("\n".join([*_facts(command, audit), "", *_data(data), *_error(_last_error(audit)), *history(audit)]))


def fields(command: Command) -> dict[str, Any]:
    """For JSON."""
    return {
        "command_id": command.command_id,
        "domain": command.domain,
        "type": command.command_type,
        "status": command.status,
        "attempts": command.attempts,
        "max_attempts": command.max_attempts,
        "error_type": command.last_error_type,
        "error_code": command.last_error_code,
        "error_message": command.last_error_msg,
        "sent_at": command.created_at,
        "since": command.updated_at,
        "correlation_id": command.correlation_id,
        "reply_to": command.reply_queue,
    }


def _facts(command: Command, audit: list[Audit]) -> list[str]:
    facts = {
        "command": str(command.command_id),
        "domain": command.domain,
        "type": plain(command.command_type),
        "status": command.status,
        "reason": _reason(audit),
        "attempts": f"{command.attempts} of {command.max_attempts}",
        "sent": ago(command.created_at),
        "since": ago(command.updated_at),
        "correlation id": str(command.correlation_id),
        "reply to": command.reply_queue,
    }
    first, *rest = [(name, value) for name, value in facts.items() if value]
    return table(first, rest)


def _reason(audit: list[Audit]) -> str:
    moved = [event for event in audit if event.event_type == AuditEvent.MOVED_TO_TROUBLESHOOTING_QUEUE]
    return str((moved[-1].details_json or {}).get("reason", "")) if moved else ""


def _last_error(audit: list[Audit]) -> dict[str, Any] | None:
    errors = [(event.details_json or {}).get("error") for event in reversed(audit)]
    return next((error for error in errors if error), None)


def _data(data: dict[str, Any] | None) -> list[str]:
    return ["DATA", "gone" if data is None else plain(json_text(data), lines=True), ""]


def _error(error: dict[str, Any] | None) -> list[str]:
    if error is None:
        return []
    lines = [f"{error.get('code')} ({error.get('type')})", error.get("message", "")]
    if error.get("details") is not None:
        lines.append(json_text(error["details"]))
    lines.append(error.get("traceback", ""))
    return ["LAST ERROR", *(plain(line.rstrip(), lines=True) for line in lines if line), ""]


def events(audit: list[Audit]) -> list[dict[str, Any]]:
    """For JSON."""
    return [{"event": event.event_type, "at": event.ts, "details": event.details_json} for event in audit]


def history(audit: list[Audit]) -> list[str]:
    """Each event with the time since the one before."""
    before: datetime | None = None
    cells = []
    for event in audit:
        passed = "" if before is None else f"+{(event.ts - before).total_seconds():,.1f} s"
        cells.append((moment(event.ts), passed, event.event_type, _details(event.details_json or {})))
        before = event.ts
    return table(("HISTORY", "", "", ""), cells, right=[1])


def _details(details: dict[str, Any]) -> str:
    error = details.get("error") or {}
    parts = [f"{error.get('code')}: {error.get('message')}"] if error else []
    for name, value in details.items():
        if name != "error" and value is not None:
            parts.append(f"{name} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
    return shortened(", ".join(parts), DETAILS_WIDTH)
