"""The leases that a process holds, from the answer of the receive until the database was told what became of them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable

from commandbus.messages import Lease, ReceivedCommand

CONFIRMED_SECONDS = 3.0
"""How long we believe that a lease is ours although it has run out: no other can take it while it is locked."""


Token = tuple[int, int]


class Leases:
    def __init__(self, vt: float) -> None:
        self.vt = vt
        self._lock = threading.Lock()
        # Both by domain and token; until when on our own clock, and never later than on the database's.
        self._held: dict[str, dict[Token, tuple[Lease, float]]] = defaultdict(dict)
        self._confirmed: dict[str, dict[Token, float]] = defaultdict(dict)

    def add(self, domain: str, received: Iterable[ReceivedCommand], asked_at: float) -> None:
        """`asked_at`: when the call that leased them was made."""
        until = asked_at + self.vt
        with self._lock:
            held = self._held[domain]
            for one in received:
                held[one.lease.token] = (one.lease, until)

    def drop(self, domain: str, leases: Iterable[Lease]) -> None:
        with self._lock:
            held, confirmed = self._held[domain], self._confirmed[domain]
            for lease in leases:
                held.pop(lease.token, None)
                if confirmed:
                    confirmed.pop(lease.token, None)

    def confirmed(self, domain: str, leases: Iterable[Lease], at: float) -> None:
        """They were ours then, but could not be extended, because somebody has locked the command."""
        with self._lock:
            held = self._held[domain]
            self._confirmed[domain] |= {lease.token: at for lease in leases if lease.token in held}

    def extended(self, domain: str, leases: Iterable[Lease], until: float) -> None:
        with self._lock:
            held = self._held[domain]
            held |= {lease.token: (lease, until) for lease in leases if lease.token in held}

    def are_sure(self, domain: str, leases: Iterable[Lease]) -> bool:
        """Whether each surely has some time left, so that a handler may be started."""
        soon = time.monotonic() + self.vt / 4
        with self._lock:
            held = self._held[domain]
            return all(lease.token in held and held[lease.token][1] > soon for lease in leases)

    def due(self, domains: Iterable[str]) -> dict[str, list[Lease]]:
        """Those of which a third has passed: time to extend them."""
        soon = time.monotonic() + 2 * self.vt / 3
        with self._lock:
            due = {
                domain: [lease for lease, until in self._held[domain].values() if until < soon] for domain in domains
            }
        return {domain: leases for domain, leases in due.items() if leases}

    def have_run_out(self, domain: str) -> bool:
        """Whether one has ended before it was extended: this process stood still, or the database was away."""
        now = time.monotonic()
        with self._lock:
            confirmed = self._confirmed[domain]
            return any(
                until < now and confirmed.get(token, 0) < now - CONFIRMED_SECONDS
                for token, (_, until) in self._held[domain].items()
            )

    def of(self, domain: str) -> list[Lease]:
        with self._lock:
            return [lease for lease, _ in self._held[domain].values()]

    def is_empty(self) -> bool:
        with self._lock:
            return not any(self._held.values())
