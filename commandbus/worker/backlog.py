"""What a worker has leased and not yet ended: never more than its executors can start before the leases end."""

from __future__ import annotations

import threading
import time
from collections import deque

from commandbus.worker.execute import Work

MOST = 500
"""However fast the handlers are, more than this per read gains nothing."""


class Backlog:
    def __init__(self, executors: int, vt: float, largest_batch: int = 1) -> None:
        self.executors = executors
        self.vt = vt
        self.largest_batch = largest_batch
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._waiting: deque[Work] = deque()
        self._started: dict[int, float] = {}
        self._held = 0
        self._closed = False
        self._seconds_per_command: float | None = None

    def put(self, work: Work) -> None:
        with self._lock:
            self._waiting.append(work)
            self._held += len(work.received)
            self._ready.notify()

    def take(self) -> Work | None:
        """The next piece of work, or None when the worker ends. Waits."""
        with self._lock:
            while not self._waiting:
                if self._closed:
                    return None
                self._ready.wait()
            work = self._waiting.popleft()
            self._started[id(work)] = time.monotonic()
            return work

    def done(self, work: Work) -> None:
        with self._lock:
            count = len(work.received)
            seconds = (time.monotonic() - self._started.pop(id(work))) / count
            known = self._seconds_per_command
            self._seconds_per_command = seconds if known is None else 0.8 * known + 0.2 * seconds
            self._held -= count

    def close(self) -> list[Work]:
        """Start nothing more, and answer what was not started."""
        with self._lock:
            self._closed = True
            rest = list(self._waiting)
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
        if self._seconds_per_command is None:
            return at_once
        # A quarter of the lease for waiting leaves the rest for running, also when the estimate was too low.
        startable = self.executors * self.vt / 4 / max(self._seconds_per_command, 1e-6)
        return max(self.executors, min(max(MOST, 2 * at_once), int(startable)))
