"""Grouped finishing: one call for whatever has gathered since the last one."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict

from django.db import DatabaseError, InterfaceError, connections

from commandbus.transitions import PostgresTransitions
from commandbus.worker.execute import Outcome, apply
from commandbus.worker.log import log

GROUP = 500
GIVE_UP_SECONDS = 10.0


class Finisher(threading.Thread):
    """Tells the database what executors did not tell themselves. Keeps trying while the database is away.

    When it has to give up at the end of the process, nothing is lost: the leases run out and the commands come back.
    """

    def __init__(self, using: str) -> None:
        super().__init__(name=f"commandbus-finish-{using}", daemon=True)
        self.transitions = PostgresTransitions(using)
        self._outcomes: queue.SimpleQueue[tuple[str, Outcome] | None] = queue.SimpleQueue()
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
                apply(self.transitions, domain, outcomes)
                return
            except (DatabaseError, InterfaceError) as error:
                connection = connections[self.transitions.using]
                lost = connection.connection is None or not connection.is_usable()
                connection.close()
                if not lost and len(outcomes) > 1:
                    # One of the group does not go through. The others must not suffer.
                    for outcome in outcomes:
                        self._apply(domain, [outcome])
                    return
                if not lost or self._must_give_up():
                    log(logging.ERROR, "finish.failed", domain=domain, count=len(outcomes), error=error)
                    return
                time.sleep(pause)
                pause = min(pause * 2, 5.0)

    def _must_give_up(self) -> bool:
        return self._stopped_at is not None and time.monotonic() - self._stopped_at > GIVE_UP_SECONDS
