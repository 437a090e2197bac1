"""What goes into an executor and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from commandbus.handlers import Handler
from commandbus.messages import Command, Failure, Finish, Lease, ReceivedCommand, Reply


@dataclass(frozen=True, slots=True)
class Work:
    """One call of a handler: one command, or several for a bulk handler."""

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

    def one_by_one(self) -> list[Work]:
        """Each command alone, with its data to be read again: the handler may have changed what was read."""
        return [replace(self, received=(one,), data=None) for one in self.received]

    @property
    def leases(self) -> list[Lease]:
        return [received.lease for received in self.received]


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
