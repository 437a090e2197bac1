"""One executor's call of a handler, as the one who watches the time sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from django.db.backends.base.base import BaseDatabaseWrapper

from commandbus.worker.work import Outcome, Work

ASYNC_GRACE = 2.0
"""A coroutine is interrupted at its timeout. Only one that does not let go of its thread needs the watch."""


class WrittenOffError(Exception):
    """The handler has taken too long, and its end was decided without it."""


@dataclass(frozen=True, slots=True)
class Session:
    """What a handler does in the database, so that it can be ended there."""

    wrapper: BaseDatabaseWrapper
    pid: int | None = None
    transaction_at: datetime | None = None

    def end(self) -> None:
        """End its statement, and the transaction that it may hold open. For a thread that may wait."""
        connection = self.wrapper.connection
        if self.pid is None:
            if connection is not None:
                connection.cancel_safe(timeout=5.0)
            return
        other = self.wrapper.copy()
        try:
            with other.cursor() as cursor:
                # Only if it is still the same transaction: behind a pooler the process may serve another client by now.
                cursor.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND xact_start = %s",
                    [self.pid, self.transaction_at],
                )
        finally:
            other.close()


class Turn:
    """Whoever comes first decides the end: the executor by `claim`, or the watch by `write_off`."""

    def __init__(self) -> None:
        self.written_off = False
        self.session: Session | None = None
        self.decided: list[Outcome] = []
        """Of bulk commands: the ends of those whose turn was before the one that is running."""
        self._lock = threading.Lock()
        self._work: Work | None = None
        self._deadline = 0.0
        self._begun_at = 0.0
        self._spent = 0.0

    def begin(self, work: Work) -> None:
        with self._lock:
            if self.written_off:
                raise WrittenOffError
            self.session = None
            self._work = None
            self._begun_at = time.monotonic()
            if work.handler is not None and work.handler.timeout is not None:
                self._work = work
                grace = ASYNC_GRACE if work.handler.is_async else 0.0
                self._deadline = time.monotonic() + work.handler.timeout + grace

    def check(self) -> None:
        """Raises WrittenOffError if there is no point in going on."""
        if self.written_off:
            raise WrittenOffError

    def claim(self) -> None:
        """The handler has come to its end. Raises WrittenOffError if that was decided already."""
        with self._lock:
            self._work = None
            if self.written_off:
                raise WrittenOffError
            now = time.monotonic()
            self._spent += now - self._begun_at
            self._begun_at = now

    def spent(self) -> float:
        """The seconds that handlers have taken since this was last asked."""
        spent, self._spent = self._spent, 0.0
        return spent

    def overdue_seconds(self) -> float:
        """How long the handler has taken that is written off."""
        return time.monotonic() - self._begun_at

    def write_off(self, domains: Collection[str]) -> Work | None:
        """Answers the work of a handler that has taken too long; from now on it is ours to end."""
        with self._lock:
            if self._work is None or self._work.domain not in domains or time.monotonic() < self._deadline:
                return None
            work, self._work = self._work, None
            self.written_off = True
            return work
