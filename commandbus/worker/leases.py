"""The leases that a process holds, from the answer of the receive until the database was told what became of them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable

from commandbus.messages import Lease, ReceivedCommand

CONFIRMED_SECONDS = 3.0
"""How long we believe that a lease is ours although it has run out: no other can take it while it is locked."""


class Leases:
    def __init__(self, vt: float) -> None:
        self.vt = vt
        self._lock = threading.Lock()
        self._until: dict[tuple[str, Lease], float] = {}  # on our own clock, and never later than on the database's
        self._confirmed: dict[tuple[str, Lease], float] = {}

    def add(self, domain: str, received: Iterable[ReceivedCommand], asked_at: float) -> None:
        """`asked_at`: when the call that leased them was made."""
        with self._lock:
            for one in received:
                self._until[(domain, one.lease)] = asked_at + self.vt

    def drop(self, domain: str, leases: Iterable[Lease]) -> None:
        with self._lock:
            for lease in leases:
                self._until.pop((domain, lease), None)
                self._confirmed.pop((domain, lease), None)

    def confirmed(self, domain: str, leases: Iterable[Lease], at: float) -> None:
        """They were ours then, but could not be extended, because somebody has locked the command."""
        with self._lock:
            for lease in leases:
                if (domain, lease) in self._until:
                    self._confirmed[(domain, lease)] = at

    def extended(self, domain: str, leases: Iterable[Lease], until: float) -> None:
        with self._lock:
            for lease in leases:
                if (domain, lease) in self._until:
                    self._until[(domain, lease)] = until

    def is_sure(self, domain: str, lease: Lease) -> bool:
        """Whether it surely has some time left, so that a handler may be started."""
        with self._lock:
            return time.monotonic() < self._until.get((domain, lease), 0) - self.vt / 4

    def due(self, domains: Iterable[str]) -> dict[str, list[Lease]]:
        """Those of which a third has passed: time to extend them."""
        mine = set(domains)
        soon = time.monotonic() + 2 * self.vt / 3
        due: dict[str, list[Lease]] = defaultdict(list)
        with self._lock:
            for (domain, lease), until in self._until.items():
                if domain in mine and until < soon:
                    due[domain].append(lease)
        return due

    def have_run_out(self, domain: str) -> bool:
        """Whether one has ended before it was extended: this process stood still, or the database was away."""
        now = time.monotonic()
        with self._lock:
            return any(
                until < now and self._confirmed.get(lease, 0) < now - CONFIRMED_SECONDS
                for lease, until in self._until.items()
                if lease[0] == domain
            )

    def of(self, domain: str) -> list[Lease]:
        with self._lock:
            return [lease for where, lease in self._until if where == domain]

    def is_empty(self) -> bool:
        with self._lock:
            return not self._until
