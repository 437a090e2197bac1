"""What a supervisor has to do with the databases: tell them of deaths, and ask them for suspects.

In a thread of its own, so that a database which does not answer never keeps the supervisor from its processes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections

from commandbus.models import Suspect
from commandbus.transitions import PostgresTransitions
from commandbus.worker.log import log, logger

LOOK_SECONDS = 1.0
AGAIN_SECONDS = 2.0
"""After which a death is reported once more: the last call of the dead may just have been under way."""


@dataclass
class Death:
    """What is to be told about a process that has died."""

    node_id: UUID
    pid: int | None
    started: Mapping[str, list[tuple[int, int]]]
    """By domain, the ranges of msg_id that it was running."""
    killed: bool
    """By us: then nobody is suspected."""
    domains: list[str] = field(default_factory=list)
    """Those that are still to be told."""
    due_at: float = 0.0
    last: bool = False


class Reports(threading.Thread):
    def __init__(self, databases: Mapping[str, str]) -> None:
        super().__init__(name="commandbus-report", daemon=True)
        self.databases = databases
        self.explained: set[UUID] = set()
        """The dead for whose death there is a suspect."""
        self._suspects: dict[str, int] = {}
        self._deaths: list[Death] = []
        self._looked_at = 0.0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._away: set[str] = set()

    def add(self, death: Death) -> None:
        death.domains = list(self.databases)
        with self._lock:
            self._deaths.append(death)
        self._wake.set()

    def suspects(self) -> int:
        """As many as were seen at the last look."""
        return sum(self._suspects.values())

    def has_looked_since(self, at: float) -> bool:
        return self._looked_at > at

    def stop(self, seconds: float) -> None:
        """Report what is left, for so long at most."""
        self._stopping.set()
        self._wake.set()
        self.join(seconds)

    def run(self) -> None:
        try:
            while not self._stopping.is_set() or any(not death.last for death in self._deaths):
                self._wake.clear()
                try:
                    self.run_once()
                except Exception:  # noqa: BLE001 - without this thread no death would be reported any more
                    logger.exception("the reports go on after an unexpected error")
                self._wake.wait(0.2 if self._stopping.is_set() else LOOK_SECONDS)
        finally:
            connections.close_all()

    def run_once(self) -> None:
        started_at = time.monotonic()
        for death in list(self._deaths):
            if death.due_at <= started_at:
                self._report(death)
        for domain, using in self.databases.items():
            try:
                self._suspects[domain] = Suspect.objects.using(using).filter(domain=domain).count()
            except (DatabaseError, InterfaceError) as error:
                self._is_away(using, error)
            else:
                self._away.discard(using)
        self._looked_at = started_at

    def _report(self, death: Death) -> None:
        for domain in list(death.domains):
            using = self.databases[domain]
            try:
                released, accused, remaining = PostgresTransitions(using).node_died(
                    domain, death.node_id, death.started.get(domain, []), killed=death.killed
                )
            except (DatabaseError, InterfaceError) as error:
                self._is_away(using, error)
                continue
            if released or accused:
                log(
                    logging.WARNING,
                    "death.reported",
                    domain=domain,
                    pid=death.pid,
                    released=released,
                    suspects=accused,
                )
            if accused:
                self.explained.add(death.node_id)
            if not remaining:
                death.domains.remove(domain)
        if death.domains:
            death.due_at = time.monotonic() + LOOK_SECONDS
        elif not death.last:
            death.domains, death.due_at, death.last = list(self.databases), time.monotonic() + AGAIN_SECONDS, True
        else:
            with self._lock:
                self._deaths.remove(death)

    def _is_away(self, using: str, error: Exception) -> None:
        if using not in self._away:  # once is enough
            log(logging.WARNING, "database.unreachable", database=using, error=str(error).strip())
        self._away.add(using)
        connections[using].close()
