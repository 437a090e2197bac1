"""What a worker has leased and not yet ended: not more than its executors can start soon, for others may be idle."""

from __future__ import annotations

import threading
import time
from collections import deque

from commandbus.worker.work import Work

REMEMBERED_SECONDS = 10.0
AHEAD_SECONDS = 1.0
"""How long a command may wait here for an executor. While it does, no other worker can have it."""
MOST = 500
"""However fast the handlers are, more than this per read gains nothing."""


class Backlog:
    def __init__(self, executors: int, largest_batch: int = 1) -> None:
        self.executors = executors
        self.largest_batch = largest_batch
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._waiting: deque[tuple[Work, float]] = deque()  # with the time since when
        self._started: dict[int, tuple[Work, float]] = {}
        self._held = 0
        self._closed = False
        self._seconds: dict[str, tuple[float, float]] = {}  # by command type: of one command, and when that was seen

    def put(self, work: Work) -> None:
        with self._lock:
            self._waiting.append((work, time.monotonic()))
            self._held += len(work.received)
            self._ready.notify()

    def take(self) -> Work | None:
        """The next piece of work, or None when the worker ends. Waits."""
        with self._lock:
            while not self._waiting:
                if self._closed:
                    return None
                self._ready.wait()
            work, _ = self._waiting.popleft()
            self._started[id(work)] = (work, time.monotonic())
            return work

    def done(self, work: Work, *, ran: bool = True) -> None:
        with self._lock:
            now = time.monotonic()
            seconds = (now - self._started.pop(id(work))[1]) / len(work.received)
            if ran:
                command_type = work.received[0].command.command_type
                known, _ = self._seconds.get(command_type, (seconds, now))
                self._seconds[command_type] = (0.8 * known + 0.2 * seconds, now)
            self._held -= len(work.received)

    def surplus(self) -> list[Work]:
        """What has waited too long, because handlers are slower than it was believed: to be given back."""
        with self._lock:
            rest = []
            too_long = time.monotonic() - AHEAD_SECONDS
            while self._waiting and self._waiting[0][1] < too_long and self._held > self._limit():
                work, _ = self._waiting.popleft()
                self._held -= len(work.received)
                rest.append(work)
            return rest

    def close(self) -> list[Work]:
        """Start nothing more, and answer what was not started."""
        with self._lock:
            self._closed = True
            rest = [work for work, _ in self._waiting]
            self._waiting.clear()
            self._held -= sum(len(work.received) for work in rest)
            self._ready.notify_all()
            return rest

    def room(self) -> int:
        with self._lock:
            return max(0, self._limit() - self._held)

    def is_idle(self) -> bool:
        with self._lock:
            return self._held == 0

    def is_low(self) -> bool:
        """Time to fetch: at most half of what may be held is left."""
        with self._lock:
            return 2 * self._held <= self._limit()

    def _limit(self) -> int:
        at_once = max(self.executors, self.largest_batch)
        now = time.monotonic()
        known = [seconds for seconds, seen in self._seconds.values() if seen > now - REMEMBERED_SECONDS]
        running = [(now - at) / len(work.received) for work, at in self._started.values()]
        slowest = max([*known, *(seconds for seconds in running if seconds > AHEAD_SECONDS / 2)], default=None)
        if slowest is None:
            return at_once
        startable = self.executors * AHEAD_SECONDS / max(slowest, 1e-6)
        return max(self.executors, min(max(MOST, 2 * at_once), int(startable)))
