from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from commandbus.worker.group import Group
from commandbus.worker.turn import Turn
from commandbus.worker.work import Work

SLOW_SECONDS = 0.5
"""A handler that was believed to be quick, and is not after this time, must not keep others waiting."""
READY_SECONDS = 0.1


class Seat:
    """The place of one executor. When its handler takes too long, another thread takes the seat."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.turn = Turn()
        self.thread: threading.Thread | None = None
        self.work: Work | None = None
        """What was taken from the backlog."""
        self.group = Group([])
        """What of it is not yet begun."""
        self.running: list[Work] = []
        """What of it is begun and not ended: one call, or all that share a transaction."""
        self._begun_at = 0.0
        self._ready_at = 0.0

    def take(self, work: Work, calls: Sequence[Work] | None = None) -> Group:
        """`calls`: what is left of it to be called; all, if None."""
        self.work = work
        self.running = []
        self.group = Group(work.calls() if calls is None else calls)
        return self.group

    def begin(self, one: Work) -> None:
        self._begun_at = time.monotonic()
        self.turn.decided = []
        self.running.append(one)

    def ended(self, one: Work) -> None:
        self.running = [other for other in self.running if other is not one]

    def rise(self) -> None:
        self.work = None
        self.running = []

    def was_ready(self) -> None:
        """What was taken had its leases, and its database was there."""
        self._ready_at = time.monotonic()

    def is_ready(self) -> bool:
        """Whether that was a moment ago, so that nobody needs to ask again."""
        return time.monotonic() - self._ready_at < READY_SECONDS

    def is_slow(self) -> bool:
        """Whether what runs here holds up the rest of its group."""
        return bool(self.running) and self._begun_at < time.monotonic() - SLOW_SECONDS
