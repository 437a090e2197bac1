"""Actions on commands in the Troubleshooting Queue. One command is many of one.

The forms for one command raise CommandRefusedError when it was left alone. Those for many answer what was done and why
the rest was not: a conflict never stops the others. They work in chunks, and each chunk commits by itself unless the
caller has a transaction open, so that a hundred thousand commands are never locked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any, TypeVar
from uuid import UUID

from commandbus.api import database_of, uuid_of
from commandbus.exceptions import CommandRefusedError, InvalidCommandError
from commandbus.messages import Answer, json_object, storable
from commandbus.models import Command
from commandbus.models.command import CommandQuerySet
from commandbus.pgmq.notify import notify_sent
from commandbus.transitions import PostgresTransitions

CHUNK = 1000

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TroubleshootingFilter:
    """Which commands of the Troubleshooting Queue; all of them, if it says nothing."""

    type: str | None = None
    error_type: str | None = None
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
        return commands.filter(**{name: value for name, value in fields.items() if value is not None})


EVERYTHING = TroubleshootingFilter()


@dataclass(frozen=True)
class ActionResult:
    done: list[UUID] = field(default_factory=list)
    refused: dict[UUID, str] = field(default_factory=dict)
    """Why each of the others was left alone."""


Which = Iterable[UUID] | TroubleshootingFilter
"""Ids, or all that match a filter at the moment of the call."""

Progress = Callable[[int, int], None]
"""Called after each chunk with how many were dealt with, and how many there are."""


def in_troubleshooting(domain: str, which: Which = EVERYTHING) -> CommandQuerySet:
    """Those that are in the Troubleshooting Queue, to be counted, ordered and cut."""
    using = database_of(domain)
    if isinstance(which, TroubleshootingFilter):
        return which.of(domain, using)
    ids = [uuid_of(command_id, "command_id") for command_id in which]
    return EVERYTHING.of(domain, using).filter(command_id__in=ids)


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


def get_payload(domain: str, command_id: UUID) -> dict[str, Any] | None:
    """The data of a command. None when it is gone: a completed one has it only with COMMANDBUS["PAYLOAD_ARCHIVE"]."""
    command_id = uuid_of(command_id, "command_id")
    payload: dict[str, Any] | None = _transitions(domain).payloads(domain, [command_id]).get(command_id)
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
    def retry(ids: Sequence[UUID]) -> list[Answer]:
        answers = _transitions(domain).operator_retry(domain, ids, _text(operator), _text(reason))
        return _woken(domain, answers)

    return _in_chunks(_ids(domain, which), retry, progress)


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
) -> ActionResult:
    """`edits`: the new data, by command id."""
    checked = {uuid_of(command_id, "command_id"): data for command_id, data in edits.items()}
    for command_id, data in checked.items():
        json_object(data, f"the new data of command {command_id}")  # all of them, before the first is sent

    def edit(ids: Sequence[UUID]) -> list[Answer]:
        changes = {command_id: checked[command_id] for command_id in ids}
        return _woken(domain, _transitions(domain).operator_edit(domain, changes, _text(operator), _text(reason)))

    return _in_chunks(list(checked), edit, progress)


def operator_cancel(domain: str, command_id: UUID, reason: str, *, operator: str | None = None) -> None:
    """End it as CANCELED. The sender gets the reason with the reply."""
    _require_done(domain, operator_cancel_many(domain, [command_id], reason, operator=operator))


def operator_cancel_many(
    domain: str, which: Which, reason: str, *, operator: str | None = None, progress: Progress | None = None
) -> ActionResult:
    if not isinstance(reason, str) or not reason.strip():
        raise InvalidCommandError("an operator's cancel needs a reason: the sender gets it with the reply")

    def cancel(ids: Sequence[UUID]) -> list[Answer]:
        return _transitions(domain).operator_cancel(domain, ids, storable(reason), _text(operator))

    return _in_chunks(_ids(domain, which), cancel, progress)


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

    def complete(ids: Sequence[UUID]) -> list[Answer]:
        transitions = _transitions(domain)
        return transitions.operator_complete(domain, ids, result_data, _text(operator), _text(reason))

    return _in_chunks(_ids(domain, which), complete, progress)


def _transitions(domain: str) -> PostgresTransitions:
    return PostgresTransitions(database_of(domain))


def _text(value: str | None) -> str | None:
    return None if value is None else storable(value)


def _ids(domain: str, which: Which) -> list[UUID]:
    if isinstance(which, TroubleshootingFilter):
        return list(in_troubleshooting(domain, which).order_by("id").values_list("command_id", flat=True))
    return list(dict.fromkeys(uuid_of(command_id, "command_id") for command_id in which))


def _in_chunks(
    ids: list[UUID], action: Callable[[Sequence[UUID]], list[Answer]], progress: Progress | None
) -> ActionResult:
    result = ActionResult()
    for chunk in _chunks(ids):
        answers = {answer.command_id: answer for answer in action(chunk)}
        for answer in map(answers.__getitem__, chunk):  # in the order that the caller knows
            if answer.done:
                result.done.append(answer.command_id)
            else:
                result.refused[answer.command_id] = answer.why or ""
        if progress is not None:
            progress(len(result.done) + len(result.refused), len(ids))
    return result


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    remaining = iter(items)
    while chunk := list(islice(remaining, CHUNK)):
        yield chunk


def _woken(domain: str, answers: list[Answer]) -> list[Answer]:
    if any(answer.done for answer in answers):
        notify_sent(domain, database_of(domain))
    return answers


def _require_done(domain: str, result: ActionResult) -> None:
    for command_id, why in result.refused.items():
        raise CommandRefusedError(domain, command_id, why)
