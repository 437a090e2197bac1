"""Actions on commands in the Troubleshooting Queue. One command is many of one.

The forms for one command raise CommandRefusedError when it was left alone. Those for many answer what was done and why
the rest was not: a conflict never stops the others. They work in chunks, and each chunk commits by itself unless the
caller has a transaction open, so that a hundred thousand commands are never locked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connections
from django.db.models import Q

from commandbus.api import database_of, uuid_of
from commandbus.encoding import json_object
from commandbus.exceptions import CommandRefusedError, InvalidCommandError
from commandbus.messages import Answer, storable
from commandbus.models import Command
from commandbus.models.command import CommandQuerySet
from commandbus.pgmq.notify import notify_sent
from commandbus.transitions import PostgresTransitions

CHUNK = 1000
MOST_GROUPS = 200


@dataclass(frozen=True, kw_only=True)
class TroubleshootingFilter:
    """Which commands of the Troubleshooting Queue; all of them, if it says nothing."""

    type: str | None = None
    error_type: str | None = None
    """"" for those without one; so with the code."""
    error_code: str | None = None
    since: datetime | None = None
    """In the Troubleshooting Queue since this time or later."""
    until: datetime | None = None

    def of(self, domain: str, using: str) -> CommandQuerySet:
        commands = Command.objects.using(using).troubleshooting(domain)
        fields = {
            "command_type": self.type,
            "last_error_type": self.error_type,
            "last_error_code": self.error_code,
            "updated_at__gte": self.since,
            "updated_at__lte": self.until,
        }
        for name, value in fields.items():
            if value == "":
                commands = commands.filter(Q(**{name: ""}) | Q(**{name: None}))
            elif value is not None:
                commands = commands.filter(**{name: value})
        return commands


EVERYTHING = TroubleshootingFilter()


@dataclass(frozen=True, kw_only=True)
class Group:
    """Commands of the Troubleshooting Queue with the same type and the same error."""

    domain: str
    type: str
    error_type: str
    error_code: str
    count: int
    first_at: datetime
    last_at: datetime
    """When the first and the last of them came to the queue."""
    sample_id: UUID
    sample_message: str | None


@dataclass(frozen=True)
class ActionResult:
    done: list[UUID] = field(default_factory=list)
    refused: dict[UUID, str] = field(default_factory=dict)
    """Why each of the others was left alone."""


@dataclass(frozen=True)
class Selection:
    """Commands as they were when somebody chose them. What was retried since is refused, also if it is back again."""

    messages: Mapping[UUID, int]
    """The id of each one's message: every retry makes a new one."""


Which = Iterable[UUID] | TroubleshootingFilter | Selection
"""Ids, what was selected, or all that match a filter at the moment of the call."""

Action = Callable[[Sequence[UUID], Sequence[int] | None], list[Answer]]

Progress = Callable[[int, int], None]
"""Called after each chunk with how many were dealt with, and how many there are."""


def in_troubleshooting(domain: str, which: Which = EVERYTHING) -> CommandQuerySet:
    """Those that are in the Troubleshooting Queue, to be counted, ordered and cut."""
    using = database_of(domain)
    if isinstance(which, TroubleshootingFilter):
        return which.of(domain, using)
    ids = which.messages if isinstance(which, Selection) else which
    return EVERYTHING.of(domain, using).filter(command_id__in=[uuid_of(one, "command_id") for one in ids])


def groups(domain: str, *, at_most: int = 100_000) -> tuple[list[Group], bool]:
    """The largest first, and whether there are more than these."""
    with connections[database_of(domain)].cursor() as cursor:
        cursor.execute(
            "SELECT command_type, error_type, error_code, commands, first_at, last_at, sample_id, sample_message, more"
            " FROM commandbus.troubled_groups(%s, %s)",
            [domain, at_most],
        )
        rows = cursor.fetchall()
    found = [
        Group(
            domain=domain,
            type=command_type,
            error_type=error_type,
            error_code=error_code,
            count=count,
            first_at=first_at,
            last_at=last_at,
            sample_id=sample_id,
            sample_message=sample_message,
        )
        for command_type, error_type, error_code, count, first_at, last_at, sample_id, sample_message, _ in rows
    ]
    return found[:MOST_GROUPS], any(row[-1] for row in rows) or len(found) > MOST_GROUPS


def select(domain: str, which: TroubleshootingFilter, *, at_most: int | None = None) -> Selection:
    """What matches now, for somebody who is asked before something is done about it; the oldest, if it is too much."""
    commands = in_troubleshooting(domain, which).order_by("id")[:at_most]
    return Selection({command_id: msg_id or 0 for command_id, msg_id in commands.values_list("command_id", "msg_id")})


def list_troubleshooting(
    domain: str,
    *,
    type: str | None = None,  # noqa: A002 - the seed's name
    error_type: str | None = None,
    error_code: str | None = None,
    limit: int = 100,
) -> list[Command]:
    """What waits for an operator, the newest commands first."""
    which = TroubleshootingFilter(type=type, error_type=error_type, error_code=error_code)
    return list(in_troubleshooting(domain, which).order_by("-id")[:limit])


def get_payload(domain: str, command_id: UUID, *, exactly: bool = False) -> dict[str, Any] | None:
    """The data of a command. None when it is gone: a completed one has it only with COMMANDBUS["PAYLOAD_ARCHIVE"].

    `exactly`, for who writes it back: raise InvalidCommandError for numbers that Python would round.
    """
    command_id = uuid_of(command_id, "command_id")
    payloads = _transitions(domain).payloads(domain, [command_id], exactly=exactly)
    payload: dict[str, Any] | None = payloads.get(command_id)
    return payload


def operator_retry(domain: str, command_id: UUID, *, operator: str | None = None, reason: str | None = None) -> None:
    """Send it again, with its payload, under its id."""
    _require_done(domain, operator_retry_many(domain, [command_id], operator=operator, reason=reason))


def operator_retry_many(
    domain: str,
    which: Which,
    *,
    operator: str | None = None,
    reason: str | None = None,
    progress: Progress | None = None,
) -> ActionResult:
    def retry(ids: Sequence[UUID], msg_ids: Sequence[int] | None) -> list[Answer]:
        transitions = _transitions(domain)
        answers = transitions.operator_retry(domain, ids, _text(operator), _text(reason), msg_ids=msg_ids)
        return _woken(domain, answers)

    return _in_chunks(domain, which, retry, progress)


def operator_edit(
    domain: str, command_id: UUID, data: Mapping[str, Any], *, operator: str | None = None, reason: str | None = None
) -> None:
    """Send it again with other data, under its id. The data before stay in the audit."""
    _require_done(domain, operator_edit_many(domain, {command_id: data}, operator=operator, reason=reason))


def operator_edit_many(
    domain: str,
    edits: Mapping[UUID, Mapping[str, Any]],
    *,
    operator: str | None = None,
    reason: str | None = None,
    progress: Progress | None = None,
    seen: Selection | None = None,
) -> ActionResult:
    """`edits`: the new data, by command id. `seen`: these commands as they were when they were edited."""
    checked = {uuid_of(command_id, "command_id"): data for command_id, data in edits.items()}
    for command_id, data in checked.items():
        json_object(data, f"the new data of command {command_id}")  # all of them, before the first is sent

    def edit(ids: Sequence[UUID], msg_ids: Sequence[int] | None) -> list[Answer]:
        changes = {command_id: checked[command_id] for command_id in ids}
        transitions = _transitions(domain)
        answers = transitions.operator_edit(domain, changes, _text(operator), _text(reason), msg_ids=msg_ids)
        return _woken(domain, answers)

    return _in_chunks(domain, list(checked) if seen is None else seen, edit, progress)


def operator_cancel(domain: str, command_id: UUID, reason: str, *, operator: str | None = None) -> None:
    """End it as CANCELED. The sender gets the reason with the reply."""
    _require_done(domain, operator_cancel_many(domain, [command_id], reason, operator=operator))


def operator_cancel_many(
    domain: str, which: Which, reason: str, *, operator: str | None = None, progress: Progress | None = None
) -> ActionResult:
    require_reason(reason)

    def cancel(ids: Sequence[UUID], msg_ids: Sequence[int] | None) -> list[Answer]:
        transitions = _transitions(domain)
        return transitions.operator_cancel(domain, ids, storable(reason), _text(operator), msg_ids=msg_ids)

    return _in_chunks(domain, which, cancel, progress)


def cancel_waiting_many(
    domain: str,
    which: Iterable[UUID] | Selection,
    reason: str,
    *,
    operator: str | None = None,
    progress: Progress | None = None,
) -> ActionResult:
    """End commands as CANCELED that no worker has begun: an operator's form of `cancel_command`."""
    require_reason(reason)

    def cancel(ids: Sequence[UUID], msg_ids: Sequence[int] | None) -> list[Answer]:
        return _transitions(domain).cancel(domain, ids, storable(reason), _text(operator), msg_ids=msg_ids)

    return _in_chunks(domain, which, cancel, progress)


def operator_complete(
    domain: str,
    command_id: UUID,
    result_data: Mapping[str, Any] | None = None,
    *,
    operator: str | None = None,
    reason: str | None = None,
) -> None:
    """End it as COMPLETED, because somebody has done it by other means. The sender gets `result_data` as the reply."""
    _require_done(domain, operator_complete_many(domain, [command_id], result_data, operator=operator, reason=reason))


def operator_complete_many(
    domain: str,
    which: Which,
    result_data: Mapping[str, Any] | None = None,
    *,
    operator: str | None = None,
    reason: str | None = None,
    progress: Progress | None = None,
) -> ActionResult:
    if result_data is not None:
        json_object(result_data, "result_data")

    def complete(ids: Sequence[UUID], msg_ids: Sequence[int] | None) -> list[Answer]:
        transitions, by = _transitions(domain), (_text(operator), _text(reason))
        return transitions.operator_complete(domain, ids, result_data, *by, msg_ids=msg_ids)

    return _in_chunks(domain, which, complete, progress)


def require_reason(reason: object) -> None:
    if not isinstance(reason, str) or not reason.strip():
        raise InvalidCommandError("an operator's cancel needs a reason: the sender gets it with the reply")


def _transitions(domain: str) -> PostgresTransitions:
    return PostgresTransitions(database_of(domain))


def _text(value: str | None) -> str | None:
    return None if value is None else storable(value)


def _in_chunks(domain: str, which: Which, action: Action, progress: Progress | None) -> ActionResult:
    messages: Mapping[UUID, int] | None = None
    if isinstance(which, TroubleshootingFilter):
        which = select(domain, which)
    if isinstance(which, Selection):
        which = messages = which.messages
    ids = list(dict.fromkeys(uuid_of(one, "command_id") for one in which))
    result = ActionResult()
    for chunk in _chunks(ids):
        msg_ids = None if messages is None else [messages[command_id] for command_id in chunk]
        answers = {answer.command_id: answer for answer in action(chunk, msg_ids)}
        for answer in map(answers.__getitem__, chunk):  # in the order that the caller knows
            if answer.done:
                result.done.append(answer.command_id)
            else:
                result.refused[answer.command_id] = answer.why or ""
        if progress is not None:
            progress(len(result.done) + len(result.refused), len(ids))
    return result


def _chunks(ids: list[UUID]) -> Iterator[list[UUID]]:
    for start in range(0, len(ids), CHUNK):
        yield ids[start : start + CHUNK]


def _woken(domain: str, answers: list[Answer]) -> list[Answer]:
    if any(answer.done for answer in answers):
        notify_sent(domain, database_of(domain))
    return answers


def _require_done(domain: str, result: ActionResult) -> None:
    for command_id, why in result.refused.items():
        raise CommandRefusedError(domain, command_id, why)
