"""Grouped finishing: one call for whatever has gathered since the last one."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from uuid import UUID

from django.db import DatabaseError, InterfaceError, OperationalError, connections, transaction

from commandbus.messages import Failure, Finish, Reason
from commandbus.models import Command
from commandbus.transitions import PostgresTransitions
from commandbus.worker.errors import error_info
from commandbus.worker.execute import apply
from commandbus.worker.log import log
from commandbus.worker.work import Outcome

GROUP = 500
MOST_WAITING = 4 * GROUP
"""How many outcomes may wait for the database before no more is fetched from it."""
GIVE_UP_SECONDS = 10.0
LOCK_TIMEOUT = "500ms"
POSTPONE_SECONDS = 1.0
PASSING = ("08", "25006", "40", "53", "55", "57")
"""SQLSTATEs that say nothing against the outcome: connection, a standby, deadlock, no resources, locked, canceled."""


Groups = dict[tuple[str, type[Outcome]], list[Outcome]]
"""By domain and kind."""


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
        self._in_hand = 0
        self._ended = False
        self._stopped_at: float | None = None

    def put(self, domain: str, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self._outcomes.put((domain, outcome))

    def is_behind(self) -> bool:
        """Handlers can be quicker than the database takes their outcomes, which cost memory and are not safe."""
        return self._outcomes.qsize() + self._in_hand + len(self._postponed) > MOST_WAITING

    def stop(self) -> None:
        """Finish what is there, then end."""
        self._stopped_at = time.monotonic()
        self._outcomes.put(None)

    def run(self) -> None:
        try:
            while not self._ended or self._postponed:
                group = self._next_group()
                self._in_hand = sum(map(len, group.values()))
                for (domain, _), outcomes in group.items():
                    self._apply(domain, outcomes)
                self._in_hand = 0
                for (domain, _), outcomes in self._due().items():
                    self._apply(domain, outcomes, wait=False)
        finally:
            connections[self.transitions.using].close()

    def _next_group(self) -> Groups:
        """What has gathered, by domain and kind. Waits for the first, or until a postponed one is due."""
        group: Groups = defaultdict(list)
        now = time.monotonic()
        wait = min((max(0.0, at - now) for at, _, _ in self._postponed), default=None)
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

    def _due(self) -> Groups:
        """What was postponed long enough. Apart from the rest, which need not wait for it again."""
        now = time.monotonic()
        due: Groups = defaultdict(list)
        for at, domain, outcome in self._postponed:
            if at <= now:
                due[(domain, type(outcome))].append(outcome)
        self._postponed = [entry for entry in self._postponed if entry[0] > now]
        return due

    def _apply(self, domain: str, outcomes: list[Outcome], *, wait: bool = True) -> None:
        """With `wait` for a moment for whoever has locked one of the commands; else without those."""
        pause = 0.1
        while True:
            try:
                self._tell(domain, outcomes, wait=wait)
                return
            except Exception as error:  # noqa: BLE001 - this thread must not end: all others rely on it
                if not self._is_away():
                    self._not_taken(domain, outcomes, error, wait=wait)
                    return
                if self._must_give_up(domain, outcomes, error):
                    self._told(domain, outcomes)
                    return
            time.sleep(pause)
            pause = min(pause * 2, 5.0)

    def _not_taken(self, domain: str, outcomes: list[Outcome], error: Exception, *, wait: bool) -> None:
        """One does not go through, or somebody has locked it. The others must not suffer."""
        if _is_passing(error):
            if wait:
                self._apply(domain, outcomes, wait=False)
            else:
                self._postpone(domain, outcomes, error)
            return
        if len(outcomes) > 1:
            for outcome in outcomes:
                self._apply(domain, [outcome], wait=wait)
            return
        [outcome] = outcomes
        log(logging.ERROR, "finish.refused", domain=domain, command_id=outcome.lease.command_id, error=error)
        if isinstance(outcome, Finish):
            # The database will never take it. An operator has to know, or the command would run for ever.
            self._apply(domain, [Failure(outcome.lease, error_info(error), reason=Reason.PERMANENT)])
        else:
            self._told(domain, outcomes)

    def _tell(self, domain: str, outcomes: list[Outcome], *, wait: bool) -> None:
        """In one transaction. A lock that somebody has on one command holds up the others for a moment only."""
        using = self.transitions.using
        locked: set[UUID] = set()
        with transaction.atomic(using=using):
            with connections[using].cursor() as cursor:
                # For this transaction only: behind a pooler, the session may be another client's next.
                cursor.execute("SELECT set_config('lock_timeout', %s, true)", [LOCK_TIMEOUT])
            if not wait:
                locked = self._locked(domain, [outcome.lease.command_id for outcome in outcomes])
            free = [outcome for outcome in outcomes if outcome.lease.command_id not in locked]
            apply(self.transitions, domain, free)
        self._told(domain, free)
        if locked:
            self._postpone(domain, [outcome for outcome in outcomes if outcome.lease.command_id in locked], "locked")

    def _locked(self, domain: str, command_ids: list[UUID]) -> set[UUID]:
        """Those that somebody else has locked. The others are ours until the end of the transaction."""
        commands = Command.objects.using(self.transitions.using).these(domain, command_ids)
        free = set(commands.select_for_update(skip_locked=True).values_list("command_id", flat=True))
        return set(commands.values_list("command_id", flat=True)) - free

    def _postpone(self, domain: str, outcomes: list[Outcome], why: object) -> None:
        if self._must_give_up(domain, outcomes, why):
            self._told(domain, outcomes)
            return
        later = time.monotonic() + POSTPONE_SECONDS
        self._postponed += [(later, domain, outcome) for outcome in outcomes]

    def _is_away(self) -> bool:
        connection = connections[self.transitions.using]
        if connection.connection is not None and connection.is_usable():
            return False
        connection.close()
        return True

    def _must_give_up(self, domain: str, outcomes: list[Outcome], why: object) -> bool:
        if self._stopped_at is None or time.monotonic() - self._stopped_at < GIVE_UP_SECONDS:
            return False
        log(logging.ERROR, "finish.given_up", domain=domain, count=len(outcomes), error=why)
        return True


def _is_passing(error: Exception) -> bool:
    """Whether the same call may go through later."""
    if not isinstance(error, DatabaseError | InterfaceError):
        return False
    state = getattr(error.__cause__, "sqlstate", None)
    if state is None:  # not PostgreSQL has spoken, but the connection
        return isinstance(error, OperationalError | InterfaceError)
    return str(state).startswith(PASSING)
