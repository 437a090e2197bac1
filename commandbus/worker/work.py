"""What goes into an executor and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

from commandbus.handlers import Handler
from commandbus.messages import Failure, Finish, Lease, ReceivedCommand


@dataclass(frozen=True, slots=True)
class Work:
    """One call of a handler: one command, or several for a bulk handler."""

    domain: str
    handler: Handler | None
    received: tuple[ReceivedCommand, ...]

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
