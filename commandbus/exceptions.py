"""Every error of commandbus. What a handler raises to say how a command ended stands in the second half."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID


class CommandBusError(Exception):
    """The base of all errors that commandbus raises itself."""


class ConfigurationError(CommandBusError):
    """The COMMANDBUS setting, a handler or a name is wrong."""


class InvalidCommandError(CommandBusError, ValueError):
    """What was given for a command cannot be used as it is. Nothing was written."""


class InvalidDataError(CommandBusError, ValueError):
    """The data of a command does not fit what its handler asks for.

    `errors` has the path of each wrong field ("lines.0.amount", or "" for the whole) and what is wrong with it. The
    value itself is not repeated: it may be a secret.
    """

    def __init__(self, errors: Sequence[tuple[str, str]]) -> None:
        self.errors = errors
        super().__init__(errors)

    def under(self, key: object) -> list[tuple[str, str]]:
        """The errors as seen from the object or array that holds this value under `key`."""
        shown = str(key)[:100]  # a key is data too, and as long as it likes
        return [(f"{shown}.{field}" if field else shown, message) for field, message in self.errors]

    def __str__(self) -> str:
        return "; ".join(f"{field}: {message}" if field else message for field, message in self.errors)


class UnknownDomainError(CommandBusError):
    """The domain is not registered. Nothing was written."""


class UnknownQueueError(CommandBusError):
    """The reply queue does not exist. Nothing was written."""


class UnsupportedIsolationLevelError(CommandBusError):
    """The transaction does not run in READ COMMITTED."""


class DuplicateCommandError(CommandBusError):
    """A command id was sent before with another type or other data. Nothing of this call was written.

    For a batch that is created with all its commands, also with the same: they would be part of something else.
    """

    def __init__(self, domain: str, command_ids: list[UUID], why: str | None = None) -> None:
        self.domain = domain
        self.command_ids = command_ids
        shown = ", ".join(str(command_id) for command_id in command_ids[:5])
        more = f" and {len(command_ids) - 5} more" if len(command_ids) > 5 else ""
        super().__init__(
            why
            or f"domain {domain!r} already has {shown}{more} with another type or other data; "
            f"send a changed command under a new id"
        )


class TransactionMismatchError(CommandBusError):
    """A transaction is open, but in another database than the domain's, so no send can be part of it.

    Nothing was written.
    """

    def __init__(self, domain: str, using: str, open_on: str) -> None:
        self.domain = domain
        self.using = using
        self.open_on = open_on
        super().__init__(
            f"domain {domain!r} lives on database {using!r}, but the transaction that is open is on {open_on!r}: "
            f"what is sent now would stay sent if that one were rolled back; "
            f"open transaction.atomic(using={using!r}) around the send, "
            f"or send from transaction.on_commit(…, using={open_on!r}), "
            f"or pass outside_transaction=True if that is what you want"
        )


class CommandRefusedError(CommandBusError):
    """The command is not in a state that allows this; the message says which state it is in."""

    def __init__(self, domain: str, command_id: UUID, why: str) -> None:
        self.domain = domain
        self.command_id = command_id
        self.why = why
        super().__init__(f"command {command_id} in domain {domain!r} was left alone: {why}")


class UnknownCommandError(CommandBusError):
    """There is no such command."""


class UncommittedCommandError(CommandBusError):
    """The command waits for a transaction of the caller's own, so it makes no sense to wait for its reply."""


class ReplyTimeoutError(CommandBusError, TimeoutError):
    """No reply has come within the time. It may still come."""


class UnknownBatchError(CommandBusError):
    """There is no such batch. Nothing was written."""


class BatchRefusedError(CommandBusError):
    """The batch is not in a state that allows this; the message says why. Nothing was written."""


class UncommittedBatchError(CommandBusError):
    """The batch waits for a transaction of the caller's own, so it makes no sense to wait for its end."""


class BatchTimeoutError(CommandBusError, TimeoutError):
    """The batch has not completed within the time. It goes on."""


class UnreachableError(ConfigurationError):
    """There is no PostgreSQL where it should be, or it does not let us in."""


class SparkJobRefusedError(CommandBusError):
    """The Spark job of this id is not in a state that allows this; the message says why. Nothing was written."""


class LeaseLostError(CommandBusError):
    """The lease ran out and the command belongs to someone else now. The late worker must stop quietly."""


class HandlerError(CommandBusError):
    """What a handler raises to say how its command ended."""

    def __init__(self, code: str, message: str = "", details: Mapping[str, Any] | None = None) -> None:
        self.code = code
        self.message = message
        self.details = dict(details) if details is not None else None
        super().__init__(code, message)

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" if self.message else self.code


class TransientCommandError(HandlerError):
    """It may work later: try again after the backoff, and when no attempt is left, ask an operator."""


class PermanentCommandError(HandlerError):
    """It will not work as it is: ask an operator at once."""


class BusinessRuleError(HandlerError):
    """The answer is no: the command ends as FAILED and the sender gets a reply with this error."""


class CommandCanceled(HandlerError):  # noqa: N818 - it is no error but a way to end
    """The handler decided not to do it: the command ends as CANCELED."""
