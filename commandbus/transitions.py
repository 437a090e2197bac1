"""The Python face of the SQL functions, one method each. Nothing else changes a command.

`Transitions` is the interface, `PostgresTransitions` the real thing, `commandbus.testing.InMemoryBus` its small twin.
Every method takes many commands, makes one round trip, and runs in the transaction it finds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

import psycopg
from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from commandbus import conf
from commandbus.encoding import json_object, parse_exactly, parse_json
from commandbus.exceptions import (
    BatchRefusedError,
    CommandBusError,
    DuplicateCommandError,
    InvalidCommandError,
    UnknownBatchError,
    UnknownDomainError,
    UnknownQueueError,
    UnsupportedIsolationLevelError,
)
from commandbus.messages import (
    Answer,
    BatchRepair,
    Command,
    Failure,
    Finish,
    Lease,
    NewCommand,
    ReceivedCommand,
    Status,
)
from commandbus.typed import data_json


class Transitions(Protocol):
    def send(self, domain: str, commands: Sequence[NewCommand], *, wake: bool = False) -> dict[UUID, str]:
        """SENT, DUPLICATE, CONFLICT or TOO_LARGE per id. After one of the last two nothing of the call was written."""

    def receive(self, domain: str, *, qty: int, vt: int, node_id: UUID | None = None) -> list[ReceivedCommand]:
        """Lease up to `qty` ready commands for `vt` seconds."""

    def finish(self, domain: str, finishes: Sequence[Finish]) -> set[UUID]:
        """End leased commands with a reply each. Ids that are missing in the answer have lost their lease."""

    def fail(self, domain: str, failures: Sequence[Failure]) -> dict[UUID, Status]:
        """Retry or move to the Troubleshooting Queue; answers the new status."""

    def release(self, domain: str, leases: Sequence[Lease], delay: float = 0) -> set[UUID]:
        """Give back what was not started, with its attempt; visible again after `delay` seconds."""

    def extend(self, domain: str, leases: Sequence[Lease], seconds: float) -> dict[UUID, bool]:
        """Let leases end `seconds` from now. Ids that are missing in the answer have lost their lease.

        False: the command is locked at this moment; it is still ours, but ends when it did.
        """

    def unhandled(self, domain: str, leases: Sequence[Lease], grace: float | None = None) -> dict[UUID, Status]:
        """Give back what this worker has no handler for. What nobody handles goes to the Troubleshooting Queue.

        `grace`: the seconds that this must last; None for the domain's.
        """

    def cancel(self, domain: str, command_ids: Sequence[UUID], reason: str | None = None) -> list[Answer]:
        """Cancel what waits and is not leased."""

    def operator_retry(
        self, domain: str, command_ids: Sequence[UUID], operator: str | None = None, reason: str | None = None
    ) -> list[Answer]: ...

    def operator_edit(
        self,
        domain: str,
        edits: Mapping[UUID, Mapping[str, Any]],
        operator: str | None = None,
        reason: str | None = None,
    ) -> list[Answer]:
        """Retry with other data, by command id."""

    def operator_cancel(
        self, domain: str, command_ids: Sequence[UUID], reason: str, operator: str | None = None
    ) -> list[Answer]: ...

    def operator_complete(
        self,
        domain: str,
        command_ids: Sequence[UUID],
        result: Mapping[str, Any] | None = None,
        operator: str | None = None,
        reason: str | None = None,
    ) -> list[Answer]: ...


@dataclass(frozen=True, slots=True)
class PostgresTransitions:
    using: str

    def send(
        self,
        domain: str,
        commands: Sequence[NewCommand],
        max_attempts: Sequence[int | None] | None = None,
        *,
        wake: bool = False,
        batch_id: UUID | None = None,
    ) -> dict[UUID, str]:
        """`wake`: an idle worker, with the commit. For calls that are a transaction of their own.

        `batch_id`: as part of this batch, which must be open. Errors of it break the transaction.
        """
        others = self._call(
            "SELECT command_id, outcome FROM commandbus.send("
            "%s, %b::uuid[], %b::text[], %b::text[]::jsonb[], %b::text[], %b::uuid[], %b::float8[], %b::int[],"
            " %s, %s) WHERE outcome <> 'SENT'",
            [
                domain,
                [command.command_id for command in commands],
                [command.command_type for command in commands],
                bodies_of(commands),
                _optional([command.reply_to for command in commands]),
                _optional([command.correlation_id for command in commands]),
                _optional([command.delay for command in commands]),
                _optional(max_attempts or []),
                wake,
                batch_id,
            ],
        )
        if any(outcome != "DUPLICATE" for _, outcome in others):
            return dict(others)
        return {**{command.command_id: "SENT" for command in commands}, **dict(others)}

    def receive(
        self,
        domain: str,
        *,
        qty: int,
        vt: int,
        node_id: UUID | None = None,
        floor: int | None = None,
        leave: Sequence[str] = (),
    ) -> list[ReceivedCommand]:
        """In the order of their messages.

        With `floor`, only messages from that id on are looked at: quick where taken ones are still in the way.

        Commands of the types in `leave` stay for others.
        """
        rows = self._call(
            "SELECT command_id, command_type, correlation_id, reply_to, created_at, data::text, msg_id, read_ct,"
            " batch_id, row_id, attempt, max_attempts, lease_expires_at"
            " FROM commandbus.receive(%s, %s, %s, %s, %s, %s::text[])",
            [domain, qty, vt, node_id, floor, list(leave)],
        )
        return [_received(domain, row) for row in rows]

    def receive_suspect(self, domain: str, *, vt: int, node_id: UUID) -> list[ReceivedCommand]:
        """Lease one command that may have killed a process. For a process that runs nothing else at the time."""
        rows = self._call(
            "SELECT command_id, command_type, correlation_id, reply_to, created_at, data::text, msg_id, read_ct,"
            " batch_id, row_id, attempt, max_attempts, lease_expires_at FROM commandbus.receive_suspect(%s, %s, %s)",
            [domain, vt, node_id],
        )
        return [_received(domain, row) for row in rows]

    def finish(self, domain: str, finishes: Sequence[Finish]) -> set[UUID]:
        rows = self._call(
            "SELECT commandbus.finish(%s, %b::uuid[], %b::bigint[], %b::int[],"
            " %b::text[], %b::text[]::jsonb[], %b::text[]::jsonb[], %b::bigint[])",
            [
                domain,
                *_tokens([finish.lease for finish in finishes]),
                [finish.status.value for finish in finishes],
                _optional([None if f.result is None else json_object(f.result, "the result") for f in finishes]),
                _optional([None if f.error is None else f.error.as_json() for f in finishes]),
                _all_or_none([finish.lease.row_id for finish in finishes]),
            ],
        )
        return {row[0] for row in rows}

    def fail(self, domain: str, failures: Sequence[Failure]) -> dict[UUID, Status]:
        rows = self._call(
            "SELECT command_id, status FROM commandbus.fail("
            "%s, %s::uuid[], %s::bigint[], %s::int[], %s::jsonb[], %s::float8[], %s::text[])",
            [
                domain,
                *_tokens([failure.lease for failure in failures]),
                [failure.error.as_json() for failure in failures],
                _optional([failure.delay for failure in failures]),
                _optional([None if f.reason is None else f.reason.value for f in failures]),
            ],
        )
        return {command_id: Status(status) for command_id, status in rows}

    def release(self, domain: str, leases: Sequence[Lease], delay: float = 0) -> set[UUID]:
        rows = self._call(
            "SELECT commandbus.release(%s, %s::uuid[], %s::bigint[], %s::int[], %s)",
            [domain, *_tokens(leases), delay],
        )
        return {row[0] for row in rows}

    def extend(self, domain: str, leases: Sequence[Lease], seconds: float) -> dict[UUID, bool]:
        rows = self._call(
            "SELECT command_id, moved FROM commandbus.extend(%s, %s::uuid[], %s::bigint[], %s::int[], %s)",
            [domain, *_tokens(leases), seconds],
        )
        return dict(rows)

    def unhandled(self, domain: str, leases: Sequence[Lease], grace: float | None = None) -> dict[UUID, Status]:
        rows = self._call(
            "SELECT command_id, status FROM commandbus.unhandled(%s, %s::uuid[], %s::bigint[], %s::int[], %s)",
            [domain, *_tokens(leases), grace],
        )
        return {command_id: Status(status) for command_id, status in rows}

    def node_died(
        self, domain: str, node_id: UUID, started: Sequence[tuple[int, int]] = (), *, killed: bool = False
    ) -> tuple[int, int, int]:
        """Give back what a dead process held. What it was running, by ranges of msg_id, becomes a suspect.

        Nobody is suspected if we have `killed` it ourselves. Answers how many commands were released, how many accused,
        and how many are locked: ask again for these.
        """
        [row] = self._call(
            "SELECT released, accused, remaining FROM commandbus.node_died(%s, %s, %s::bigint[], %s::bigint[], %s)",
            [domain, node_id, [low for low, _ in started], [high for _, high in started], killed],
        )
        return row[0], row[1], row[2]

    def release_unknown(self, domain: str, node_id: UUID, held: Sequence[int]) -> set[UUID]:
        """Give back what was leased to this node in a call whose answer was lost. `held`: the msg_ids it knows of."""
        rows = self._call("SELECT commandbus.release_unknown(%s, %s, %s::bigint[])", [domain, node_id, list(held)])
        return {row[0] for row in rows}

    def pause(self, domain: str, paused: bool, operator: str | None = None, reason: str | None = None) -> bool:
        [row] = self._call("SELECT commandbus.pause(%s, %s, %s, %s)", [domain, paused, operator, reason])
        return bool(row[0])

    def cancel(
        self,
        domain: str,
        command_ids: Sequence[UUID],
        reason: str | None = None,
        operator: str | None = None,
        *,
        msg_ids: Sequence[int] | None = None,
    ) -> list[Answer]:
        return self._answers(
            "SELECT command_id, done, why FROM commandbus.cancel(%s, %s::uuid[], %s, %s, %s::bigint[])",
            [domain, list(command_ids), reason, operator, None if msg_ids is None else list(msg_ids)],
        )

    def operator_retry(
        self,
        domain: str,
        command_ids: Sequence[UUID],
        operator: str | None = None,
        reason: str | None = None,
        *,
        msg_ids: Sequence[int] | None = None,
    ) -> list[Answer]:
        """`msg_ids`, here and below: their messages when they were chosen. What has another one by now is refused."""
        return self._answers(
            "SELECT command_id, done, why FROM commandbus.operator_retry(%s, %s::uuid[], %s, %s, %s::bigint[])",
            [domain, list(command_ids), operator, reason, _given(msg_ids)],
        )

    def operator_edit(
        self,
        domain: str,
        edits: Mapping[UUID, Mapping[str, Any]],
        operator: str | None = None,
        reason: str | None = None,
        *,
        msg_ids: Sequence[int] | None = None,
    ) -> list[Answer]:
        return self._answers(
            "SELECT command_id, done, why"
            " FROM commandbus.operator_edit(%s, %s::uuid[], %s::jsonb[], %s, %s, %s::bigint[])",
            [
                domain,
                list(edits),
                [json_object(data, f"the new data of command {command_id}") for command_id, data in edits.items()],
                operator,
                reason,
                None if msg_ids is None else list(msg_ids),
            ],
        )

    def operator_cancel(
        self,
        domain: str,
        command_ids: Sequence[UUID],
        reason: str,
        operator: str | None = None,
        *,
        msg_ids: Sequence[int] | None = None,
    ) -> list[Answer]:
        return self._answers(
            "SELECT command_id, done, why FROM commandbus.operator_cancel(%s, %s::uuid[], %s, %s, %s::bigint[])",
            [domain, list(command_ids), reason, operator, _given(msg_ids)],
        )

    def operator_complete(
        self,
        domain: str,
        command_ids: Sequence[UUID],
        result: Mapping[str, Any] | None = None,
        operator: str | None = None,
        reason: str | None = None,
        *,
        msg_ids: Sequence[int] | None = None,
    ) -> list[Answer]:
        return self._answers(
            "SELECT command_id, done, why FROM commandbus.operator_complete("
            "%s, %s::uuid[], %s::jsonb, %s, %s, %s::bigint[])",
            [
                domain,
                list(command_ids),
                None if result is None else json_object(result, "the result"),
                operator,
                reason,
                _given(msg_ids),
            ],
        )

    def open_batch(
        self,
        domain: str,
        batch_id: UUID,
        *,
        name: str | None = None,
        custom_data: Mapping[str, Any] | None = None,
        expected_count: int | None = None,
        on_complete: NewCommand | None = None,
    ) -> bool:
        """Answers whether it is new. Raises BatchRefusedError if it was opened with other content."""
        [(is_new,)] = self._call(
            "SELECT commandbus.open_batch(%s, %s, %s, %s::jsonb, %s, %s::jsonb)",
            [
                domain,
                batch_id,
                name,
                None if custom_data is None else json_object(custom_data, "custom_data"),
                expected_count,
                None if on_complete is None else _callback(on_complete),
            ],
        )
        return bool(is_new)

    def seal_batch(
        self, domain: str, batch_id: UUID, *, allow_incomplete: bool = False, operator: str | None = None
    ) -> bool:
        """Answers whether it was open."""
        [(was_open,)] = self._call(
            "SELECT commandbus.seal_batch(%s, %s, %s, %s)", [domain, batch_id, allow_incomplete, operator]
        )
        return bool(was_open)

    def cancel_batch(self, domain: str, batch_id: UUID, reason: str, operator: str | None = None) -> bool:
        """Mark it, and take no more commands. Answers whether that is new; its commands are canceled one by one."""
        [(is_new,)] = self._call("SELECT commandbus.cancel_batch(%s, %s, %s, %s)", [domain, batch_id, reason, operator])
        return bool(is_new)

    def repair_batch(self, domain: str, batch_id: UUID, operator: str | None = None) -> list[BatchRepair]:
        rows = self._call(
            "SELECT what, before, after FROM commandbus.repair_batch(%s, %s, %s)", [domain, batch_id, operator]
        )
        return [BatchRepair(batch_id, *row) for row in rows]

    def prune_batches(self, domain: str, before: datetime, qty: int) -> int:
        """Remove up to `qty` batches that completed before `before` and whose commands are pruned."""
        [(pruned,)] = self._call("SELECT commandbus.prune_batches(%s, %s, %s)", [domain, before, qty])
        return int(pruned)

    def payloads(self, domain: str, command_ids: Sequence[UUID], *, exactly: bool = False) -> dict[UUID, Any]:
        """The data of commands; None where they are gone. Unknown ids are missing.

        `exactly`: raise InvalidCommandError where Python would not hold all of it.
        """
        rows = self._call(
            "SELECT command_id, data::text FROM commandbus.payloads(%s, %s::uuid[])", [domain, list(command_ids)]
        )
        if exactly:
            return {command_id: parse_exactly(data or "null") for command_id, data in rows}
        return {command_id: _parsed(data) for command_id, data in rows}

    def prune_commands(self, domain: str, before: datetime, qty: int) -> int:
        """Remove up to `qty` resolved commands that were last changed before `before`. Their ids stay taken.

        Answers how many were removed: less than `qty` when nothing is left but what somebody has locked.
        """
        [(pruned,)] = self._call("SELECT commandbus.prune_commands(%s, %s, %s)", [domain, before, qty])
        return int(pruned)

    def _answers(self, query: str, params: list[Any]) -> list[Answer]:
        return [Answer(*row) for row in self._call(query, params)]

    def _call(self, query: str, params: list[Any]) -> list[tuple[Any, ...]]:
        """In `query`, `%b` marks a large parameter: psycopg writes arrays many times faster in the binary format."""
        with _own_errors(), binary_cursor(connections[self.using]) as cursor:
            cursor.execute(query, params)
            return list(cursor.fetchall())


_ERRORS: dict[str, type[CommandBusError]] = {
    "CB001": UnknownDomainError,
    "CB002": InvalidCommandError,
    "CB003": UnsupportedIsolationLevelError,
    "CB004": UnknownQueueError,
    "CB005": UnknownBatchError,
    "CB006": BatchRefusedError,
    "CB007": DuplicateCommandError,
}


def binary_cursor(wrapper: BaseDatabaseWrapper) -> CursorWrapper:
    """A cursor of Django's, but of one that sends parameters apart from the statement, and gets binary results."""
    wrapper.close_if_health_check_failed()
    wrapper.ensure_connection()
    cursor: Any = psycopg.Cursor(wrapper.connection)
    cursor.format = psycopg.pq.Format.BINARY
    return wrapper.make_debug_cursor(cursor) if wrapper.queries_logged else wrapper.make_cursor(cursor)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Errors that the SQL functions raise themselves come out as ours, with their hint."""
    try:
        yield
    except DatabaseError as error:
        cause = error.__cause__
        own = _ERRORS.get(getattr(cause, "sqlstate", None) or "")
        if own is None:
            raise
        diagnostics = cause.diag  # type: ignore[union-attr]
        message = f"{diagnostics.message_primary}. {diagnostics.message_hint}"
        if own is DuplicateCommandError:
            domain, command_id = str(diagnostics.message_detail).split()
            raise DuplicateCommandError(domain, [UUID(command_id)], message) from error
        raise own(message) from error


def too_large(command_id: UUID, than: str) -> InvalidCommandError:
    return InvalidCommandError(
        f"command {command_id}: its data takes more bytes than {than}; "
        f"send a reference to it, or raise COMMANDBUS['MAX_PAYLOAD_BYTES']"
    )


def bodies_of(commands: Sequence[NewCommand]) -> list[str]:
    """Their data as JSON text. Raises InvalidCommandError if PostgreSQL cannot hold them, or if they are too large."""
    limit = conf.current().max_payload_bytes
    texts = []
    for command in commands:
        text = data_json(command)
        if len(text.encode()) > limit:
            raise too_large(command.command_id, f"the limit of {limit}")
        texts.append(text)
    return texts


def _callback(command: NewCommand) -> str:
    """The command as it waits for the end of its batch."""
    [data] = bodies_of([command])
    rest = {
        "command_type": command.command_type,
        "command_id": str(command.command_id),
        "reply_to": command.reply_to,
        "correlation_id": None if command.correlation_id is None else str(command.correlation_id),
        "delay": command.delay,
    }
    told = {key: value for key, value in rest.items() if value is not None}
    return f'{json.dumps(told)[:-1]}, "data": {data}}}'


def _tokens(leases: Sequence[Lease]) -> list[list[Any]]:
    return [
        [lease.command_id for lease in leases],
        [lease.msg_id for lease in leases],
        [lease.read_ct for lease in leases],
    ]


def _given(values: Sequence[Any] | None) -> list[Any] | None:
    return None if values is None else list(values)


def _optional(values: Sequence[Any]) -> list[Any] | None:
    """An array parameter that is NULL as a whole where it says nothing."""
    return list(values) if any(value is not None for value in values) else None


def _all_or_none(values: list[Any]) -> list[Any] | None:
    return None if None in values else values


def _parsed(data: str | None) -> Any:
    """The data of a message, or None if Python cannot hold what PostgreSQL can: it must not stop its neighbours."""
    try:
        return parse_json(data or "null")
    except (ValueError, RecursionError):
        return None


def _received(domain: str, row: tuple[Any, ...]) -> ReceivedCommand:
    command_id, command_type, correlation_id, reply_to, created_at, data, msg_id, read_ct, batch_id, row_id, *more = row
    return ReceivedCommand(
        Command(
            command_id=command_id,
            command_type=command_type,
            domain=domain,
            correlation_id=correlation_id,
            reply_to=reply_to,
            created_at=created_at,
            data=_parsed(data),
            batch_id=batch_id,
        ),
        Lease(command_id, msg_id, read_ct, row_id),
        *more,
    )
