"""Grouped finishing: one call for whatever has gathered since the last one."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable

from django.db import DatabaseError, InterfaceError, OperationalError, connections, transaction

from commandbus.messages import Failure, Finish, Reason
from commandbus.transitions import PostgresTransitions
from commandbus.worker.errors import error_info
from commandbus.worker.execute import apply
from commandbus.worker.log import log
from commandbus.worker.work import Outcome

GROUP = 500
GIVE_UP_SECONDS = 10.0
LOCK_TIMEOUT = "2s"
POSTPONE_SECONDS = 1.0
PASSING = ("08", "25006", "40", "53", "55", "57")
"""SQLSTATEs that say nothing against the outcome: connection, a standby, deadlock, no resources, locked, canceled."""


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
        self._postponed: list[tuple[float, str, Outcome]] = []
        self._ended = False
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
            while not self._ended or self._postponed:
                for (domain, _), outcomes in self._next_group().items():
                    self._apply(domain, outcomes)
        finally:
            connections[self.transitions.using].close()

    def _next_group(self) -> dict[tuple[str, type[Outcome]], list[Outcome]]:
        """What has gathered, by domain and kind. Waits for the first, or until a postponed one is due."""
        group: dict[tuple[str, type[Outcome]], list[Outcome]] = defaultdict(list)
        now = time.monotonic()
        due = [(domain, outcome) for at, domain, outcome in self._postponed if at <= now]
        self._postponed = [entry for entry in self._postponed if entry[0] > now]
        for domain, outcome in due:
            group[(domain, type(outcome))].append(outcome)
        wait = 0.0 if group else min((at - now for at, _, _ in self._postponed), default=None)
        for _ in range(GROUP):
            try:
                item = self._outcomes.get(timeout=wait)
            except queue.Empty:
                break
            if item is None:
                self._ended = True  # nothing comes after it
                break
            group[(item[0], type(item[1]))].append(item[1])
            wait = 0.0
        return group

    def _apply(self, domain: str, outcomes: list[Outcome]) -> None:
        pause = 0.1
        while True:
            try:
                self._tell(domain, outcomes)
                break
            except Exception as error:  # noqa: BLE001 - this thread must not end: all others rely on it
                if not self._is_away():
                    self._not_taken(domain, outcomes, error)
                    return
                if self._must_give_up(domain, outcomes, error):
                    break
            time.sleep(pause)
            pause = min(pause * 2, 5.0)
        self._told(domain, outcomes)

    def _not_taken(self, domain: str, outcomes: list[Outcome], error: Exception) -> None:
        """One does not go through, or somebody has locked it. The others must not suffer."""
        if len(outcomes) > 1:
            for outcome in outcomes:
                self._apply(domain, [outcome])
            return
        [outcome] = outcomes
        if _is_passing(error):
            if self._must_give_up(domain, outcomes, error):
                self._told(domain, outcomes)
            else:
                self._postponed.append((time.monotonic() + POSTPONE_SECONDS, domain, outcome))
            return
        log(logging.ERROR, "finish.refused", domain=domain, command_id=outcome.lease.command_id, error=error)
        if isinstance(outcome, Finish):
            # The database will never take it. An operator has to know, or the command would run for ever.
            self._apply(domain, [Failure(outcome.lease, error_info(error), reason=Reason.PERMANENT)])
        else:
            self._told(domain, outcomes)

    def _tell(self, domain: str, outcomes: list[Outcome]) -> None:
        """In one transaction. Nobody's lock on one command may hold up the others for longer than the limit."""
        using = self.transitions.using
        with transaction.atomic(using=using):
            with connections[using].cursor() as cursor:
                # For this transaction only: behind a pooler, the session may be another client's next.
                cursor.execute("SELECT set_config('lock_timeout', %s, true)", [LOCK_TIMEOUT])
            apply(self.transitions, domain, outcomes)

    def _is_away(self) -> bool:
        connection = connections[self.transitions.using]
        if connection.connection is not None and connection.is_usable():
            return False
        connection.close()
        return True

    def _must_give_up(self, domain: str, outcomes: list[Outcome], error: Exception) -> bool:
        if self._stopped_at is None or time.monotonic() - self._stopped_at < GIVE_UP_SECONDS:
            return False
        log(logging.ERROR, "finish.given_up", domain=domain, count=len(outcomes), error=error)
        return True


def _is_passing(error: Exception) -> bool:
    """Whether the same call may go through later."""
    if not isinstance(error, DatabaseError | InterfaceError):
        return False
    state = getattr(error.__cause__, "sqlstate", None)
    if state is None:  # not PostgreSQL has spoken, but the connection
        return isinstance(error, OperationalError | InterfaceError)
    return str(state).startswith(PASSING)
