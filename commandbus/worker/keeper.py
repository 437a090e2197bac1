"""Keeps what a process holds in one database: its leases, its name among the living, and the time of its handlers."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections

from commandbus import nodes
from commandbus.messages import Lease
from commandbus.transitions import PostgresTransitions
from commandbus.worker.leases import Leases
from commandbus.worker.log import log, logger


class Keeper(threading.Thread):
    """Does one thing at a time, on a connection of its own: in a handler's transaction nobody else would see it."""

    def __init__(
        self,
        using: str,
        domains: Sequence[str],
        node_id: UUID,
        leases: Leases,
        *,
        register: Callable[[], None],
        watch: Callable[[], None],
        asked_to_stop: Callable[[], None],
    ) -> None:
        """`register` makes the node known; only then may it receive. `watch` is called at every tick.

        `asked_to_stop` is called, perhaps often, when an operator has done so.
        """
        super().__init__(name=f"commandbus-keep-{using}", daemon=True)
        self.using = using
        self.domains = list(domains)
        self.node_id = node_id
        self.leases = leases
        self.register = register
        self.watch = watch
        self.asked_to_stop = asked_to_stop
        self.is_registered = False
        self.transitions = PostgresTransitions(using)
        # Often enough that a node which misses several has also let its leases run out (commandbus.judge_lease).
        self.heartbeat_seconds = min(nodes.HEARTBEAT_SECONDS, leases.vt / 3)
        self._tick_seconds = min(1.0, leases.vt / 6)
        self._next_beat = 0.0
        self._away = False
        self._ended = False
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()

    def extend(self, domain: str, leases: Sequence[Lease], seconds: float) -> set[UUID]:
        """For a handler. Answers the ids whose lease is still held."""
        kept: set[UUID] = self._ask(partial(self._extend, domain, leases, seconds))
        return kept

    def renew(self) -> bool:
        """After the database was away: say that this node lives, and extend its leases. False if it is still away."""
        self._next_beat = 0.0
        return bool(self._ask(self.keep_once))

    def stop(self) -> None:
        self._requests.put(None)

    def run(self) -> None:
        try:
            while self._serve():
                try:
                    self.keep_once()
                    self.watch()
                except Exception:  # noqa: BLE001 - without this thread every lease would run out
                    logger.exception("the keeper goes on after an unexpected error")
        finally:
            self._ended = True
            while not self._requests.empty():
                self._serve()
            connections[self.using].close()

    def keep_once(self) -> bool:
        """Beat and extend as far as it is time. Answers whether the database could be told."""
        try:
            if not self.is_registered:
                self.register()
                self.is_registered = True
            if time.monotonic() >= self._next_beat:
                if nodes.heartbeat(self.using, self.node_id):
                    self.asked_to_stop()
                self._next_beat = time.monotonic() + self.heartbeat_seconds
            for domain, leases in self.leases.due(self.domains).items():
                self._extend(domain, leases, self.leases.vt)
        except (DatabaseError, InterfaceError) as error:
            if not self._away:  # once is enough
                log(logging.WARNING, "database.unreachable", database=self.using, error=str(error).strip())
            self._away = True
            connections[self.using].close()
            return False
        self._away = False
        return True

    def _extend(self, domain: str, leases: Sequence[Lease], seconds: float) -> set[UUID]:
        asked_at = time.monotonic()
        try:
            kept = self.transitions.extend(domain, leases, seconds)
        except (DatabaseError, InterfaceError):
            connections[self.using].close()  # it may have been lost while nobody used it
            kept = self.transitions.extend(domain, leases, seconds)
        lost = [lease for lease in leases if lease.command_id not in kept]
        self.leases.extended(domain, [lease for lease in leases if kept.get(lease.command_id)], asked_at + seconds)
        self.leases.confirmed(domain, [lease for lease in leases if kept.get(lease.command_id) is False], asked_at)
        self.leases.drop(domain, lost)  # no warning: most of them have just been finished
        return set(kept)

    def _ask(self, action: Callable[[], Any]) -> Any:
        if self._ended:
            raise InterfaceError("the worker has ended")
        future: Future[Any] = Future()
        self._requests.put((action, future))
        return future.result()

    def _serve(self) -> bool:
        """Wait for a request or for the next tick. False at the end."""
        try:
            request = self._requests.get(timeout=self._tick_seconds)
        except queue.Empty:
            return True
        if request is None:
            return False
        action, future = request
        try:
            future.set_result(action())
        except BaseException as error:  # noqa: BLE001 - it belongs to the one who asked
            future.set_exception(error)
        return True
