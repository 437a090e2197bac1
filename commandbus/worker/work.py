"""What goes into an executor and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from commandbus.handlers import Handler
from commandbus.messages import Command, Failure, Finish, Lease, ReceivedCommand, Reply


class Work(NamedTuple):
    """What an executor takes: one command, several for a bulk handler, or several to be handled one after the other."""

    domain: str
    handler: Handler | None
    received: tuple[ReceivedCommand, ...]
    data: tuple[Any, ...] | None = None
    """Of each command, as a typed handler wants it; of each reply, all of it."""

    @property
    def arguments(self) -> list[Command[Any]] | list[Reply]:
        """What the handler gets, for each."""
        if self.handler is not None and self.handler.replies:
            return list(self.data or ())
        commands = [received.command for received in self.received]
        if self.data is None:
            return commands
        return [replace(command, data=data) for command, data in zip(commands, self.data, strict=True)]

    @property
    def is_group(self) -> bool:
        """Whether the handler is called several times."""
        return len(self.received) > 1 and (self.handler is None or self.handler.batch_size is None)

    @property
    def may_share_transaction(self) -> bool:
        return self.is_group and self.handler is not None and self.handler.may_share_transaction

    def calls(self) -> list[Work]:
        """One for each call of the handler."""
        return self.one_by_one() if self.is_group else [self]

    def one_by_one(self) -> list[Work]:
        """Each command alone, with its data to be read again: the handler may have changed what was read."""
        return [Work(self.domain, self.handler, (one,)) for one in self.received]

    @property
    def leases(self) -> list[Lease]:
        return [received.lease for received in self.received]

    def released(self, delay: float = 0) -> list[Outcome]:
        """What becomes of it when it is given back."""
        return [Release(lease, delay) for lease in self.leases]


@dataclass(frozen=True, slots=True)
class Release:
    """The delivery did not count: give the command back with its attempt."""

    lease: Lease
    delay: float = 0


@dataclass(frozen=True, slots=True)
class Unhandled:
    """This worker has no handler for it."""

    lease: Lease


Outcome = Finish | Failure | Release | Unhandled
