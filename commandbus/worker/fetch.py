"""Fetches commands, and makes works of them for the executors."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections

from commandbus import nodes
from commandbus.handlers import HandlerRegistry
from commandbus.messages import ReceivedCommand
from commandbus.transitions import PostgresTransitions
from commandbus.worker.keeper import Keeper
from commandbus.worker.leases import Leases
from commandbus.worker.log import log
from commandbus.worker.options import Suspects, WorkerOptions
from commandbus.worker.position import Position
from commandbus.worker.work import Work

RETRY_SECONDS = 1.0


class Fetcher:
    """For one thread. It is the only one in its process that receives."""

    def __init__(
        self,
        options: WorkerOptions,
        handlers: HandlerRegistry,
        databases: Mapping[str, str],
        node_id: UUID,
        leases: Leases,
        keepers: Mapping[str, Keeper],
        *,
        is_alone: Callable[[], bool],
        is_behind: Callable[[str], bool],
    ) -> None:
        """`is_alone`: whether no handler runs in this process, not even one that was written off.

        `is_behind`: whether a database has to be told much before more is fetched from it.
        """
        self.options = options
        self.handlers = handlers
        self.databases = databases
        self.node_id = node_id
        self.leases = leases
        self.keepers = keepers
        self.is_alone = is_alone
        self.is_behind = is_behind
        self.fetched = 0
        self._positions = {domain: Position() for domain in databases}
        self._next_domain = 0
        self._retry_at: dict[str, float] = {}
        self._unsure: set[str] = set()
        self._alone = False
        self._missed: set[str] = set()
        self._elsewhere: dict[str, list[str]] = {}
        self._look_again_at: dict[str, float] = {}

    def fetch(self, room: int) -> list[Work] | None:
        """What is ready, up to `room` commands; None if we could not look."""
        if self._alone and not self.leases.is_empty():
            return None
        self._alone = False
        if self.options.suspects is Suspects.ONLY:
            return self._fetch_suspect()
        works, complete = self._fetch_all(room)
        if not works and self.options.suspects is Suspects.WHEN_IDLE and self.leases.is_empty():
            works = self._fetch_suspect() or []
        return works if works or complete else None

    def _fetch_all(self, room: int) -> tuple[list[Work], bool]:
        works: list[Work] = []
        complete = True
        domains = list(self.databases)
        first = self._next_domain
        self._next_domain = (first + 1) % len(domains)  # so that one busy domain does not starve another
        for domain in domains[first:] + domains[:first]:
            if room > 0:
                received = self._receive(domain, room)
                complete = complete and received is not None
                room -= len(received or ())
                works += self._group(domain, received or [])
        return works, complete

    def _fetch_suspect(self) -> list[Work] | None:
        """One command that may have killed a process, if nothing else is held: it must be clear who did it."""
        if not self.leases.is_empty() or not self.is_alone():
            return None
        complete = True
        for domain in self.databases:
            received = self._receive(domain, 1, suspect=True)
            if received:
                self._alone = True
                return self._group(domain, received)
            complete = complete and received is not None
        return [] if complete else None

    def _receive(self, domain: str, room: int, *, suspect: bool = False) -> list[ReceivedCommand] | None:
        using = self.databases[domain]
        started_at = time.monotonic()
        if started_at < self._retry_at.get(using, 0) or not self.keepers[using].is_registered:
            return None
        if self.is_behind(using):
            return None
        try:
            # (If leases have run out, we might receive what we are running.)
            unsure = domain in self._unsure or self.leases.have_run_out(domain)
            if unsure and not self._recover(domain):
                return None
            received = self._receive_suspect(domain) if suspect else self._receive_ready(domain, room)
        except (DatabaseError, InterfaceError) as error:
            if domain not in self._unsure:  # once is enough
                log(logging.WARNING, "fetch.failed", domain=domain, error=str(error).strip())
            connections[using].close()
            self._unsure.add(domain)
            self._retry_at[using] = time.monotonic() + RETRY_SECONDS  # other databases need not wait for this one
            return None
        self.leases.add(domain, received, started_at)
        self.fetched += len(received)
        return received

    def _receive_ready(self, domain: str, room: int) -> list[ReceivedCommand]:
        transitions, position = PostgresTransitions(self.databases[domain]), self._positions[domain]
        started_at = time.monotonic()
        floor = None if self.options.until_empty else position.floor(started_at)
        received = transitions.receive(
            domain, qty=room, vt=self.options.vt, node_id=self.node_id, floor=floor, leave=self._types_to_leave(domain)
        )
        highest = max((one.lease.msg_id for one in received), default=None)
        position.was_read(floor, started_at, time.monotonic(), highest)
        return received

    def _types_to_leave(self, domain: str) -> list[str]:
        """Types that only others handle, as far as we had to do with such: during a deployment, for example."""
        if domain in self._missed and time.monotonic() >= self._look_again_at.get(domain, 0):
            elsewhere = nodes.types_handled_elsewhere(self.databases[domain], domain, self.node_id)
            self._elsewhere[domain] = sorted(elsewhere - set(self.handlers.handled_in(domain)))
            self._look_again_at[domain] = time.monotonic() + nodes.HEARTBEAT_SECONDS
            if not self._elsewhere[domain]:
                self._missed.discard(domain)
        return self._elsewhere.get(domain, [])

    def recover(self) -> None:
        """At the end: give back what was leased by calls whose answer was lost."""
        for domain in list(self._unsure):
            try:
                self._release_unknown(domain)
            except (DatabaseError, InterfaceError):
                connections[self.databases[domain]].close()

    def _receive_suspect(self, domain: str) -> list[ReceivedCommand]:
        transitions = PostgresTransitions(self.databases[domain])
        return transitions.receive_suspect(domain, vt=self.options.vt, node_id=self.node_id)

    def _recover(self, domain: str) -> bool:
        """Leases have run out, or a call has failed and may have leased commands all the same.

        The leases that we know of are extended, if nobody has taken them. Those that we do not know of are given back;
        they are nobody's fault.
        """
        using = self.databases[domain]
        if not self.keepers[using].renew():
            self._retry_at[using] = time.monotonic() + RETRY_SECONDS
            return False
        self._release_unknown(domain)
        return True

    def _release_unknown(self, domain: str) -> None:
        held = [lease.msg_id for lease in self.leases.of(domain)]
        released = PostgresTransitions(self.databases[domain]).release_unknown(domain, self.node_id, held)
        self._unsure.discard(domain)
        log(logging.INFO, "fetch.recovered", domain=domain, released=len(released))

    def _group(self, domain: str, received: list[ReceivedCommand]) -> list[Work]:
        """One piece of work per command; for bulk handlers one per batch."""
        works = []
        same: dict[str, list[ReceivedCommand]] = defaultdict(list)
        for one in received:
            same[one.command.command_type].append(one)
        for commands in same.values():
            handler = self.handlers.of(commands[0].command)
            if handler is None:
                self._missed.add(domain)
            size = handler.batch_size if handler and handler.batch_size else 1
            works += [
                Work(domain, handler, tuple(commands[start : start + size])) for start in range(0, len(commands), size)
            ]
        if self.options.concurrency > 1:
            return works  # side by side with their like, so that executors find groups
        return sorted(works, key=lambda work: work.received[0].lease.msg_id)
