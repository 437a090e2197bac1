"""What travels: commands, leases and outcomes as plain values, and their JSON. No Django, no database."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeAlias
from uuid import UUID

from commandbus.encoding import json_text
from commandbus.exceptions import InvalidCommandError, InvalidDataError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    # Type checkers know it without its being installed. They read a plain `Command` as one with a dict.
    from typing_extensions import TypeVar

    Data_co = TypeVar("Data_co", covariant=True, default=dict[str, Any])
else:
    from typing import TypeVar

    Data_co = TypeVar("Data_co", covariant=True)

ERROR_TEXT_LIMIT = 10_000


class PydanticModel(Protocol):
    def model_dump(self) -> dict[str, Any]: ...


Data: TypeAlias = "Mapping[str, Any] | DataclassInstance | PydanticModel"
"""What can be sent: a dict, or an instance of a dataclass or of a pydantic model."""


class Status(enum.StrEnum):
    PENDING = "PENDING"  # waits for its message to become visible; a worker moves it on
    IN_PROGRESS = "IN_PROGRESS"  # leased; its worker moves it on, or another one when the lease has run out
    COMPLETED = "COMPLETED"  # done, for ever
    FAILED = "FAILED"  # a business rule said no, for ever
    CANCELED = "CANCELED"  # not done, for ever
    IN_TROUBLESHOOTING_QUEUE = "IN_TROUBLESHOOTING_QUEUE"  # waits for an operator


LIVE = (Status.PENDING, Status.IN_PROGRESS)
TERMINAL = (Status.COMPLETED, Status.FAILED, Status.CANCELED)
RARE = (Status.FAILED, Status.CANCELED, Status.IN_TROUBLESHOOTING_QUEUE)


class BatchStatus(enum.StrEnum):
    PENDING = "PENDING"  # no worker has received one of its commands
    IN_PROGRESS = "IN_PROGRESS"  # it has started
    COMPLETED = "COMPLETED"  # all of its commands are COMPLETED, for ever
    COMPLETED_WITH_FAILURES = "COMPLETED_WITH_FAILURES"  # all have ended, some of them FAILED or CANCELED, for ever


class AuditEvent(enum.StrEnum):
    SENT = "SENT"
    RECEIVED = "RECEIVED"
    RELEASED = "RELEASED"
    RETRY_SCHEDULED = "RETRY_SCHEDULED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELED = "CANCELED"
    MOVED_TO_TROUBLESHOOTING_QUEUE = "MOVED_TO_TROUBLESHOOTING_QUEUE"
    OPERATOR_RETRY = "OPERATOR_RETRY"
    OPERATOR_CANCEL = "OPERATOR_CANCEL"
    OPERATOR_COMPLETE = "OPERATOR_COMPLETE"
    OPERATOR_EDIT = "OPERATOR_EDIT"
    DOMAIN_PAUSED = "DOMAIN_PAUSED"
    DOMAIN_RESUMED = "DOMAIN_RESUMED"
    NODE_STOP_REQUESTED = "NODE_STOP_REQUESTED"
    BATCH_SEALED = "BATCH_SEALED"
    BATCH_STARTED = "BATCH_STARTED"
    BATCH_COMPLETED = "BATCH_COMPLETED"
    BATCH_CANCELED = "BATCH_CANCELED"
    BATCH_REPAIRED = "BATCH_REPAIRED"


class Reason(enum.StrEnum):
    """Why a command went to the Troubleshooting Queue."""

    PERMANENT = "PERMANENT"
    EXHAUSTED = "EXHAUSTED"
    INVALID_DATA = "INVALID_DATA"
    NO_HANDLER = "NO_HANDLER"
    WORKER_CRASHED = "WORKER_CRASHED"


class NewCommand(NamedTuple):
    """A command to be sent."""

    command_type: str
    command_id: UUID
    data: Data
    reply_to: str | None = None
    correlation_id: UUID | None = None
    delay: float | None = None


BatchCommand = NewCommand
"""A command to be sent as part of a batch, or when a batch completes."""


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """A batch as it was at one moment."""

    batch_id: UUID
    domain: str
    name: str | None
    custom_data: dict[str, Any] | None
    status: BatchStatus
    total_count: int
    completed_count: int
    failed_count: int
    canceled_count: int
    in_troubleshooting_count: int
    created_at: datetime
    started_at: datetime | None
    """When the first of its commands was received."""
    completed_at: datetime | None
    """When it was sealed and all of its commands had ended."""
    updated_at: datetime
    """When something was last counted."""
    sealed_at: datetime | None
    canceled_at: datetime | None
    expected_count: int | None
    """How many commands it shall have when it is sealed, if that was said."""
    on_complete: dict[str, Any] | None
    """The command that is sent when it completes."""
    callback_sent_at: datetime | None
    callback_error: str | None

    @property
    def is_open(self) -> bool:
        """Whether commands can still be added."""
        return self.sealed_at is None

    @property
    def is_complete(self) -> bool:
        return self.completed_at is not None

    @property
    def ended_count(self) -> int:
        return self.completed_count + self.failed_count + self.canceled_count

    @property
    def waiting_count(self) -> int:
        """Those that wait for a worker, or run."""
        return self.total_count - self.ended_count - self.in_troubleshooting_count

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> BatchMetadata:
        """From what `commandbus.batch_now` answers."""
        values = {field.name: body[field.name] for field in fields(cls)}
        for name in values.keys() & _BATCH_TIMES:
            values[name] = None if values[name] is None else datetime.fromisoformat(values[name])
        return cls(**{**values, "batch_id": UUID(body["batch_id"]), "status": BatchStatus(body["status"])})


_BATCH_TIMES = {field.name for field in fields(BatchMetadata) if field.name.endswith("_at")}


class BatchRepair(NamedTuple):
    """What was wrong with a batch."""

    batch_id: UUID
    what: str
    """The name of what was corrected; "error" if the batch could not be repaired."""
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class Command(Generic[Data_co]):
    """What a handler gets. Its data is a dict, or what the handler's annotation says: `Command[Debit]`."""

    command_id: UUID
    command_type: str
    domain: str
    correlation_id: UUID
    reply_to: str | None
    created_at: datetime
    data: Data_co
    batch_id: UUID | None = None

    if not TYPE_CHECKING:
        # Generic's own makes a `Command[Debit](…)` that fails: Python 3.11 trips over frozen dataclasses with slots.
        __class_getitem__ = classmethod(GenericAlias)


class ReplyOutcome(enum.StrEnum):
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    CANCELED = "CANCELED"


@dataclass(frozen=True, slots=True)
class ReplyError:
    code: str | None
    message: str | None
    error_class: str | None
    """"class" in the JSON."""


@dataclass(frozen=True, slots=True)
class Reply:
    """How a command has ended. What `wait_for_reply` answers, and what a reply handler gets."""

    command_id: UUID
    correlation_id: UUID
    domain: str
    type: str
    """That of the command, with "Response" after it."""
    outcome: ReplyOutcome
    completed_at: datetime
    data: dict[str, Any]
    error: ReplyError | None = None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Reply:
        """Raises InvalidDataError if it is not the envelope of a reply."""
        try:
            error = body["error"]
            return cls(
                command_id=UUID(body["command_id"]),
                correlation_id=UUID(body["correlation_id"]),
                domain=str(body["domain"]),
                type=str(body["type"]),
                outcome=ReplyOutcome(body["outcome"]),
                completed_at=datetime.fromisoformat(body["completed_at"]),
                data=dict(body["data"]),
                error=None if error is None else ReplyError(error["code"], error["message"], error["class"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise InvalidDataError([("", f"this is not the envelope of a reply: {type(problem).__name__}")]) from None


def handling_id(reply: Reply) -> UUID:
    """The id of the command that stands for the handling of a reply in the domain of its reply queue."""
    key = f"{reply.domain}/{reply.command_id}".encode()
    return UUID(bytes=hashlib.md5(key, usedforsecurity=False).digest())


class Lease(NamedTuple):
    """The right to end one delivery of a command: (msg_id, read_ct) is its token."""

    command_id: UUID
    msg_id: int
    read_ct: int
    row_id: int | None = None
    """Where the command is in the database, to find it again without a search."""

    @property
    def token(self) -> tuple[int, int]:
        return self[1:3]


class ReceivedCommand(NamedTuple):
    command: Command
    lease: Lease
    attempt: int
    max_attempts: int
    lease_expires_at: datetime


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as it is stored: of bounded length and in characters that PostgreSQL can hold."""

    type: str
    code: str
    message: str
    details: Mapping[str, Any] | None = None
    traceback: str | None = None

    def as_json(self) -> str:
        body = {
            "type": storable(self.type, 255),
            "code": storable(self.code, 255),
            "message": storable(self.message),
            "details": None if self.details is None else _storable_json(self.details),
            "traceback": None if self.traceback is None else storable(self.traceback, keep_end=True),
        }
        return json.dumps({key: value for key, value in body.items() if value is not None}, ensure_ascii=False)


class Finish(NamedTuple):
    """A leased command ends: COMPLETED with a result, FAILED or CANCELED with an error."""

    lease: Lease
    status: Status
    result: Mapping[str, Any] | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A leased command could not be ended. With a delay it is tried again, if an attempt is left."""

    lease: Lease
    error: ErrorInfo
    delay: float | None = None
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one command of an action on many."""

    command_id: UUID
    done: bool
    why: str | None


def storable(text: str, limit: int = ERROR_TEXT_LIMIT, *, keep_end: bool = False) -> str:
    """`text` without what PostgreSQL cannot hold (NUL, lone surrogates), and cut with a mark if it is too long."""
    clean = text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")
    if len(clean) <= limit:
        return clean
    mark = f"… [cut: {len(clean)} characters]"
    if keep_end:
        return mark + clean[len(mark) - limit :]
    return clean[: limit - len(mark)] + mark


def printable(value: object) -> str:
    """`str(value)`, for values that may not even be able to do that."""
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - it may raise anything
        return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"


def _storable_json(value: object) -> Any:
    try:
        text = json_text(value)
    except InvalidCommandError:
        return {"text": storable(printable(value))}
    return json.loads(text) if len(text) <= ERROR_TEXT_LIMIT else {"text": storable(text)}
