"""What a worker has leased and not yet ended: not more than its executors can start soon, for others may be idle."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from commandbus.worker.work import Work

REMEMBERED_SECONDS = 10.0
AHEAD_SECONDS = 1.0
"""How long a command may wait here for an executor. While it does, no other worker can have it."""
MOST = 500
"""However fast the handlers are, more than this per read gains nothing."""
GROUP_SECONDS = 0.05
"""How long an executor may be busy with the commands that it takes at once: others might have started them."""
LARGEST_GROUP = 50
"""A transaction with more than 64 savepoints slows down everyone in PostgreSQL."""


@dataclass(slots=True)
class _Started:
    at: float
    count: int


class Backlog:
    def __init__(self, executors: int, largest_batch: int = 1) -> None:
        self.executors = executors
        self.largest_batch = largest_batch
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._waiting: deque[tuple[Work, float]] = deque()  # with the time since when
        self._started: dict[int, _Started] = {}
        self._held = 0
        self._closed = False
        self._seconds: dict[str, tuple[float, float]] = {}  # by command type: of one command, and when that was seen
        self._calls: dict[str, float] = {}  # by command type: the seconds of the handler alone, without the commit
        self._trust: dict[str, float] = {}  # by command type that has failed in a group: how many may be in one now

    def put(self, works: list[Work]) -> None:
        with self._lock:
            now = time.monotonic()
            self._waiting.extend((work, now) for work in works)
            self._held += sum(len(work.received) for work in works)
            self._ready.notify(len(works))

    def take(self) -> Work | None:
        """The next piece of work, or None when the worker ends. Waits.

        While handlers are quick and much is waiting, it is a group of commands.
        """
        with self._lock:
            while not self._waiting:
                if self._closed:
                    return None
                self._ready.wait()
            work = self._with_others(self._waiting.popleft()[0])
            self._started[id(work)] = _Started(time.monotonic(), len(work.received))
            return work

    def done(self, work: Work, *, ran: bool = True, spent: float = 0.0) -> None:
        """`spent`: the seconds that its handler has taken."""
        with self._lock:
            now = time.monotonic()
            started = self._started.pop(id(work))
            if ran and started.count:
                command_type = work.received[0].command.command_type
                seconds = (now - started.at) / started.count
                known, _ = self._seconds.get(command_type, (seconds, now))
                self._seconds[command_type] = (0.8 * known + 0.2 * seconds, now)
                call = spent / started.count
                self._calls[command_type] = 0.8 * self._calls.get(command_type, call) + 0.2 * call
                if command_type in self._trust:
                    self._trust[command_type] += started.count / 10
                    if self._trust[command_type] >= LARGEST_GROUP:
                        del self._trust[command_type]
            self._held -= started.count

    def split(self, work: Work, rest: list[Work]) -> None:
        """Hand the rest of a piece of work that was taken, and takes longer than believed, to other executors."""
        with self._lock:
            count = sum(len(one.received) for one in rest)
            started = self._started.get(id(work))
            if started is None:
                self._held += count  # it has ended just now
            else:
                started.count -= count
            self._waiting.extend((one, time.monotonic()) for one in rest)
            self._ready.notify(len(rest))

    def failed_together(self, command_type: str) -> None:
        """Commands of this type do not get on well. For a while they are run alone, then in groups that grow."""
        with self._lock:
            self._trust[command_type] = 1.0

    def _with_others(self, work: Work) -> Work:
        """If its handler is quick, with those of the same handler that wait next, as far as others leave them to us."""
        received = list(work.received)
        if work.handler is not None and work.handler.batch_size is None:
            size = self._group_size(received[0].command.command_type)
            while len(received) < size and self._waiting and self._waiting[0][0].handler is work.handler:
                received += self._waiting.popleft()[0].received
        return work if len(received) == len(work.received) else Work(work.domain, work.handler, tuple(received))

    def _group_size(self, command_type: str) -> int:
        seconds, seen = self._seconds.get(command_type, (0.0, 0.0))
        if seen < time.monotonic() - REMEMBERED_SECONDS:
            return 1
        share = len(self._waiting) // self.executors + 1
        quick = GROUP_SECONDS / max(self._calls.get(command_type, seconds), 1e-6)
        return max(1, int(min(share, quick, LARGEST_GROUP, self._trust.get(command_type, LARGEST_GROUP))))

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
        running = [(now - started.at) / max(1, started.count) for started in self._started.values()]
        slowest = max([*known, *(seconds for seconds in running if seconds > AHEAD_SECONDS / 2)], default=None)
        if slowest is None:
            return at_once
        startable = self.executors * AHEAD_SECONDS / max(slowest, 1e-6)
        return max(self.executors, min(max(MOST, 2 * at_once), int(startable)))
