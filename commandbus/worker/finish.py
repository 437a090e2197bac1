"""Grouped finishing: one call for whatever has gathered since the last one."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable

from django.db import DatabaseError, InterfaceError, connections

from commandbus.messages import Failure, Reason
from commandbus.transitions import PostgresTransitions
from commandbus.worker.errors import error_info
from commandbus.worker.execute import apply
from commandbus.worker.log import log
from commandbus.worker.work import Outcome

GROUP = 500
GIVE_UP_SECONDS = 10.0
LOCK_TIMEOUT = "2s"
PASSING = ("40", "53", "55", "57")
"""Classes of SQLSTATE that say nothing against the outcome: deadlock, no resources, a lock held by others, canceled."""


class Finisher(threading.Thread):
    """Tells the database what executors did not tell themselves. Keeps trying while the database is away.

    When it has to give up at the end of the process, nothing is lost: the leases run out and the commands come back.
    """

    def __init__(self, using: str, told: Callable[[str, list[Outcome]], None]) -> None:
        """`told` is called with what the database knows now, or never will."""
        super().__init__(name=f"commandbus-finish-{using}", daemon=True)
        self.transitions = PostgresTransitions(using)
        self._told = told
        self._outcomes: queue.SimpleQueue[tuple[str, Outcome] | None] = queue.SimpleQueue()
        self._limited: object = None
        self._stopped_at: float | None = None

    def put(self, domain: str, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self._outcomes.put((domain, outcome))

    def stop(self) -> None:
        """Finish what is there, then end."""
        self._stopped_at = time.monotonic()
        self._outcomes.put(None)

    def run(self) -> None:
        try:
            while (group := self._next_group()) is not None:
                for domain, outcomes in group.items():
                    self._apply(domain, outcomes)
                    self._told(domain, outcomes)
        finally:
            connections[self.transitions.using].close()

    def _next_group(self) -> dict[str, list[Outcome]] | None:
        """Wait for an outcome and take what has gathered behind it. None after the last one."""
        item = self._outcomes.get()
        if item is None:
            return None
        group: dict[str, list[Outcome]] = defaultdict(list)
        group[item[0]].append(item[1])
        for _ in range(GROUP - 1):
            try:
                item = self._outcomes.get_nowait()
            except queue.Empty:
                break
            if item is None:
                self._outcomes.put(None)  # for the next call; nothing comes after it
                break
            group[item[0]].append(item[1])
        return group

    def _apply(self, domain: str, outcomes: list[Outcome]) -> None:
        pause = 0.1
        while True:
            try:
                self._limit_waiting()
                apply(self.transitions, domain, outcomes)
                return
            except Exception as error:  # noqa: BLE001 - this thread must not end: all others rely on it
                passing = self._is_passing(error)
                if len(outcomes) > 1 and not self._is_away():
                    # One of the group does not go through, or somebody has locked it. The others must not suffer.
                    for outcome in outcomes:
                        self._apply(domain, [outcome])
                    return
                if not passing:
                    self._refused(domain, outcomes, error)
                    return
                if self._must_give_up():
                    log(logging.ERROR, "finish.given_up", domain=domain, count=len(outcomes), error=error)
                    return
                time.sleep(pause)
                pause = min(pause * 2, 5.0)

    def _limit_waiting(self) -> None:
        """Nobody's lock on one command may hold up the others for longer than this. Once per connection."""
        wrapper = connections[self.transitions.using]
        wrapper.ensure_connection()
        if wrapper.connection is not self._limited:
            with wrapper.cursor() as cursor:
                cursor.execute("SELECT set_config('lock_timeout', %s, false)", [LOCK_TIMEOUT])
            self._limited = wrapper.connection

    def _is_passing(self, error: Exception) -> bool:
        """Whether the same call may go through later. Closes a connection that is lost."""
        if not isinstance(error, DatabaseError | InterfaceError):
            return False
        if self._is_away():
            connections[self.transitions.using].close()
            return True
        return (getattr(error.__cause__, "sqlstate", None) or "").startswith(PASSING)

    def _is_away(self) -> bool:
        connection = connections[self.transitions.using]
        return connection.connection is None or not connection.is_usable()

    def _refused(self, domain: str, outcomes: list[Outcome], error: Exception) -> None:
        """The database will never take this outcome. An operator has to know, or the command would run for ever."""
        [outcome] = outcomes
        log(logging.ERROR, "finish.refused", domain=domain, command_id=outcome.lease.command_id, error=error)
        failure = Failure(outcome.lease, error_info(error), reason=Reason.PERMANENT)
        try:
            self.transitions.fail(domain, [failure])
        except Exception as second:  # noqa: BLE001
            log(logging.ERROR, "finish.failed", domain=domain, command_id=outcome.lease.command_id, error=second)

    def _must_give_up(self) -> bool:
        return self._stopped_at is not None and time.monotonic() - self._stopped_at > GIVE_UP_SECONDS
