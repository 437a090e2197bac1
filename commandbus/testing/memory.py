"""A bus in memory behind the interface of `transitions.py`, for tests without PostgreSQL.

It knows no other processes and no transactions: it is for the logic of senders and handlers. One contract suite runs on
it and on PostgreSQL.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from commandbus.encoding import json_object
from commandbus.exceptions import InvalidCommandError, UnknownDomainError, UnknownQueueError
from commandbus.messages import (
    LIVE,
    Answer,
    AuditEvent,
    Command,
    ErrorInfo,
    Failure,
    Finish,
    Lease,
    NewCommand,
    Reason,
    ReceivedCommand,
    Status,
)
from commandbus.policies import LONGEST, is_between
from commandbus.testing.clock import Clock
from commandbus.testing.pgmq import FakePgmqClient
from commandbus.transitions import bodies_of
from commandbus.typed import data_json


@dataclass
class StoredCommand:
    domain: str
    command_id: UUID
    command_type: str
    data: dict[str, Any]
    correlation_id: UUID
    reply_queue: str
    max_attempts: int
    msg_id: int
    created_at: datetime
    status: Status = Status.PENDING
    attempts: int = 0
    lease_read_ct: int | None = None
    last_error_type: str | None = None
    last_error_code: str | None = None
    last_error_msg: str | None = None
    reply: dict[str, Any] | None = None
    audit: list[tuple[AuditEvent, dict[str, Any]]] = field(default_factory=list)


class InMemoryBus:
    def __init__(self, *domains: str, max_attempts: int = 3, mark_in_progress: bool = True) -> None:
        self.clock = Clock()
        self.pgmq = FakePgmqClient(self.clock)
        self.max_attempts = max_attempts
        self.mark_in_progress = mark_in_progress
        self.paused: set[str] = set()
        self.commands: dict[tuple[str, UUID], StoredCommand] = {}
        self._domains = set(domains)
        for domain in domains:
            self.pgmq.create_queue(f"{domain}__commands")
            self.pgmq.create_queue(f"{domain}__replies")

    def _verify(self, commands: Sequence[NewCommand]) -> None:
        """Refuse what PostgreSQL does."""
        bodies_of(commands)
        for command in commands:
            if not 1 <= len(command.command_type) <= 255 or not is_between(command.delay or 0, 0, LONGEST):
                raise InvalidCommandError(f"command {command.command_id} is not valid: {command!r:.500}")
            if command.reply_to is not None and command.reply_to not in self.pgmq.list_queues():
                raise UnknownQueueError(f"the reply queue {command.reply_to!r} does not exist; create it first")

    def advance(self, seconds: float) -> None:
        """Let time pass: delays, backoffs and leases end."""
        self.clock.advance(seconds)

    def send(
        self,
        domain: str,
        commands: Sequence[NewCommand],
        max_attempts: Sequence[int | None] | None = None,
        *,
        wake: bool = False,
    ) -> dict[UUID, str]:
        self._require(domain)
        self._verify(commands)
        limits = list(max_attempts or [None] * len(commands))
        contents = {command.command_id: _content(command) for command in reversed(commands)}
        conflicts = {
            command.command_id
            for command in commands
            if _content(command) != contents[command.command_id]
            or (
                (stored := self.commands.get((domain, command.command_id)))
                and _content(stored) != contents[command.command_id]
            )
        }
        if conflicts:
            return dict.fromkeys(conflicts, "CONFLICT")
        outcomes: dict[UUID, str] = {}
        for command, limit in zip(commands, limits, strict=True):
            if (domain, command.command_id) in self.commands:
                outcomes.setdefault(command.command_id, "DUPLICATE")
                continue
            body = json.loads(data_json(command))
            stored = StoredCommand(
                domain=domain,
                command_id=command.command_id,
                command_type=command.command_type,
                data=body,
                correlation_id=command.correlation_id or command.command_id,
                reply_queue=command.reply_to or f"{domain}__replies",
                max_attempts=limit or self.max_attempts,
                msg_id=self.pgmq.send(
                    f"{domain}__commands",
                    {"command_id": str(command.command_id), "data": body},
                    delay=command.delay or 0,
                ),
                created_at=self.clock.now,
            )
            self.commands[(domain, command.command_id)] = stored
            stored.audit.append((AuditEvent.SENT, {}))
            outcomes[command.command_id] = "SENT"
        return outcomes

    def receive(self, domain: str, *, qty: int, vt: int, node_id: UUID | None = None) -> list[ReceivedCommand]:
        self._require(domain)
        if domain in self.paused:
            return []
        received = []
        for message in self.pgmq.read(f"{domain}__commands", vt=vt, qty=qty):
            stored = self._command_of(domain, message.message)
            if stored is None or stored.status not in LIVE or stored.msg_id != message.msg_id:
                self.pgmq.archive(f"{domain}__commands", [message.msg_id])
                continue
            stored.attempts += stored.lease_read_ct is None
            stored.lease_read_ct = message.read_ct
            if self.mark_in_progress:
                stored.status = Status.IN_PROGRESS
            stored.audit.append((AuditEvent.RECEIVED, {"attempt": stored.attempts}))
            received.append(
                ReceivedCommand(
                    Command(
                        command_id=stored.command_id,
                        command_type=stored.command_type,
                        domain=domain,
                        correlation_id=stored.correlation_id,
                        reply_to=stored.reply_queue,
                        created_at=stored.created_at,
                        data=message.message["data"],
                    ),
                    Lease(stored.command_id, message.msg_id, message.read_ct),
                    stored.attempts,
                    stored.max_attempts,
                    self.clock.now + timedelta(seconds=vt),
                )
            )
        return received

    def finish(self, domain: str, finishes: Sequence[Finish]) -> set[UUID]:
        done = set()
        for finish in finishes:
            stored = self._leased(domain, finish.lease)
            if stored is None:
                continue
            stored.lease_read_ct = None
            self._resolve(stored, finish.status, AuditEvent(finish.status), finish.result, finish.error)
            take_away = self.pgmq.delete if finish.status is Status.COMPLETED else self.pgmq.archive
            take_away(f"{domain}__commands", [stored.msg_id])
            done.add(stored.command_id)
        return done

    def fail(self, domain: str, failures: Sequence[Failure]) -> dict[UUID, Status]:
        statuses = {}
        for failure in failures:
            stored = self._leased(domain, failure.lease)
            if stored is None:
                continue
            stored.lease_read_ct = None
            _remember(stored, failure.error)
            if failure.delay is not None and stored.attempts < stored.max_attempts:
                stored.status = Status.PENDING
                stored.audit.append((AuditEvent.RETRY_SCHEDULED, {"delay": failure.delay}))
                self.pgmq.set_vt(f"{domain}__commands", [stored.msg_id], failure.delay)
            else:
                stored.status = Status.IN_TROUBLESHOOTING_QUEUE
                reason = Reason.EXHAUSTED if failure.delay is not None else failure.reason or Reason.PERMANENT
                stored.audit.append((AuditEvent.MOVED_TO_TROUBLESHOOTING_QUEUE, {"reason": reason.value}))
                self.pgmq.archive(f"{domain}__commands", [stored.msg_id])
            statuses[stored.command_id] = stored.status
        return statuses

    def release(self, domain: str, leases: Sequence[Lease], delay: float = 0) -> set[UUID]:
        released = set()
        for lease in leases:
            stored = self._leased(domain, lease)
            if stored is not None:
                stored.lease_read_ct = None
                stored.attempts -= 1
                stored.status = Status.PENDING
                stored.audit.append((AuditEvent.RELEASED, {}))
                self.pgmq.set_vt(f"{domain}__commands", [stored.msg_id], delay)
                released.add(stored.command_id)
        return released

    def extend(self, domain: str, leases: Sequence[Lease], seconds: float) -> dict[UUID, bool]:
        held = [lease for lease in leases if self._leased(domain, lease) is not None]
        self.pgmq.set_vt(f"{domain}__commands", [lease.msg_id for lease in held], seconds)
        return {lease.command_id: True for lease in held}

    def unhandled(self, domain: str, leases: Sequence[Lease], grace: float | None = None) -> dict[UUID, Status]:
        """There are no other workers, so nobody will ever handle it."""
        error = ErrorInfo("NoHandler", "NO_HANDLER", "no handler for its type")
        statuses = self.fail(domain, [Failure(lease, error, reason=Reason.NO_HANDLER) for lease in leases])
        for command_id in statuses:
            self.commands[(domain, command_id)].attempts -= 1
        return statuses

    def cancel(self, domain: str, command_ids: Sequence[UUID], reason: str | None = None) -> list[Answer]:
        def cancel(stored: StoredCommand) -> str | None:
            if stored.lease_read_ct is not None:
                return "a worker has leased it"
            if stored.status is not Status.PENDING:
                return f"its status is {stored.status}"
            error = ErrorInfo("CommandCanceled", "CANCELED", reason or "canceled before it was started")
            self._resolve(stored, Status.CANCELED, AuditEvent.CANCELED, None, error, remember=False)
            self.pgmq.archive(f"{domain}__commands", [stored.msg_id])
            return None

        return self._each(domain, command_ids, cancel)

    def operator_retry(
        self, domain: str, command_ids: Sequence[UUID], operator: str | None = None, reason: str | None = None
    ) -> list[Answer]:
        def retry(stored: StoredCommand) -> str | None:
            stored.status = Status.PENDING
            stored.attempts = 0
            queue = f"{domain}__commands"
            stored.msg_id = self.pgmq.send(queue, self.pgmq.archived(queue, stored.msg_id) or {})
            stored.audit.append((AuditEvent.OPERATOR_RETRY, {"operator": operator, "reason": reason}))
            return None

        return self._each(domain, command_ids, _only_troubleshooting(retry))

    def operator_edit(
        self,
        domain: str,
        edits: Mapping[UUID, Mapping[str, Any]],
        operator: str | None = None,
        reason: str | None = None,
    ) -> list[Answer]:
        bodies = {command_id: json.loads(json_object(data, "the new data")) for command_id, data in edits.items()}

        def edit(stored: StoredCommand) -> str | None:
            stored.status = Status.PENDING
            stored.attempts = 0
            body = {"command_id": str(stored.command_id), "data": bodies[stored.command_id]}
            stored.msg_id = self.pgmq.send(f"{domain}__commands", body)
            by = {"operator": operator, "reason": reason}
            stored.audit.append((AuditEvent.OPERATOR_EDIT, {**by, "data": bodies[stored.command_id]}))
            stored.audit.append((AuditEvent.OPERATOR_RETRY, by))
            return None

        return self._each(domain, list(edits), _only_troubleshooting(edit))

    def operator_cancel(
        self, domain: str, command_ids: Sequence[UUID], reason: str, operator: str | None = None
    ) -> list[Answer]:
        if not reason.strip():
            raise InvalidCommandError("an operator's cancel needs a reason")

        def cancel(stored: StoredCommand) -> str | None:
            error = ErrorInfo("CommandCanceled", "OPERATOR_CANCEL", reason)
            self._resolve(stored, Status.CANCELED, AuditEvent.OPERATOR_CANCEL, None, error, remember=False)
            return None

        return self._each(domain, command_ids, _only_troubleshooting(cancel))

    def operator_complete(
        self,
        domain: str,
        command_ids: Sequence[UUID],
        result: Mapping[str, Any] | None = None,
        operator: str | None = None,
        reason: str | None = None,
    ) -> list[Answer]:
        def complete(stored: StoredCommand) -> str | None:
            self._resolve(stored, Status.COMPLETED, AuditEvent.OPERATOR_COMPLETE, result, None)
            return None

        return self._each(domain, command_ids, _only_troubleshooting(complete))

    def _resolve(
        self,
        stored: StoredCommand,
        status: Status,
        event: AuditEvent,
        result: Mapping[str, Any] | None,
        error: ErrorInfo | None,
        *,
        remember: bool = True,
    ) -> None:
        stored.status = status
        if error is not None and remember:
            _remember(stored, error)
        stored.audit.append((event, {}))
        stored.reply = {
            "command_id": str(stored.command_id),
            "correlation_id": str(stored.correlation_id),
            "domain": stored.domain,
            "type": f"{stored.command_type}Response",
            "outcome": "SUCCESS" if status is Status.COMPLETED else status.value,
            "completed_at": self.clock.now.isoformat(),
            "data": dict(result or {}),
            "error": error and {"code": error.code, "message": error.message, "class": error.type},
        }
        self.pgmq.send(stored.reply_queue, stored.reply)

    def _each(
        self, domain: str, command_ids: Sequence[UUID], action: Callable[[StoredCommand], str | None]
    ) -> list[Answer]:
        self._require(domain)
        answers = []
        for command_id in dict.fromkeys(command_ids):
            stored = self.commands.get((domain, command_id))
            why = f"there is no such command in domain {domain}" if stored is None else action(stored)
            answers.append(Answer(command_id, why is None, why))
        return answers

    def _leased(self, domain: str, lease: Lease) -> StoredCommand | None:
        stored = self.commands.get((domain, lease.command_id))
        if stored is None or (stored.msg_id, stored.lease_read_ct) != (lease.msg_id, lease.read_ct):
            return None
        return stored

    def _command_of(self, domain: str, body: Any) -> StoredCommand | None:
        try:
            return self.commands.get((domain, UUID(body["command_id"])))
        except (TypeError, KeyError, ValueError, AttributeError):
            return None

    def _require(self, domain: str) -> None:
        if domain not in self._domains:
            known = ", ".join(sorted(self._domains)) or "none"
            raise UnknownDomainError(f"domain {domain!r} is not registered; known: {known}")


def _content(command: NewCommand | StoredCommand) -> tuple[str, str]:
    data = json.loads(data_json(command)) if isinstance(command, NewCommand) else command.data
    return command.command_type, json.dumps(data, sort_keys=True)


def _remember(stored: StoredCommand, error: ErrorInfo) -> None:
    stored.last_error_type, stored.last_error_code, stored.last_error_msg = error.type, error.code, error.message


def _only_troubleshooting(action: Callable[[StoredCommand], str | None]) -> Callable[[StoredCommand], str | None]:
    def guarded(stored: StoredCommand) -> str | None:
        if stored.status is not Status.IN_TROUBLESHOOTING_QUEUE:
            return f"its status is {stored.status}"
        return action(stored)

    return guarded
