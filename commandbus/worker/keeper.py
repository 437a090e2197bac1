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
from commandbus.worker.turn import Session


class Keeper(threading.Thread):
    """Does one thing at a time, on a connection of its own: in a handler's transaction nobody else would see it."""

    def __init__(
        self, using: str, domains: Sequence[str], node_id: UUID, leases: Leases, watch: Callable[[], None]
    ) -> None:
        super().__init__(name=f"commandbus-keep-{using}", daemon=True)
        self.using = using
        self.domains = list(domains)
        self.node_id = node_id
        self.leases = leases
        self.watch = watch
        self.transitions = PostgresTransitions(using)
        # Often enough that a living node is always heard of before a lease of it can run out (see commandbus.is_dead).
        self._beat_seconds = min(nodes.HEARTBEAT_SECONDS, leases.vt / 3)
        self._tick_seconds = min(1.0, leases.vt / 6)
        self._next_beat = 0.0
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()

    def extend(self, domain: str, leases: Sequence[Lease], seconds: float) -> set[UUID]:
        """For a handler. Answers the ids whose lease is still held."""
        kept: set[UUID] = self._ask(partial(self._extend, domain, leases, seconds))
        return kept

    def renew(self) -> bool:
        """After the database was away: say that this node lives, and extend its leases. False if it is still away."""
        self._next_beat = 0.0
        return bool(self._ask(self.keep_once))

    def end_session(self, session: Session) -> None:
        """End what a handler does in the database: its statement, and the transaction that it may hold open."""
        if session.pid is not None:
            self._ask(partial(self._terminate, session))
        elif session.wrapper.connection is not None:
            session.wrapper.connection.cancel_safe(timeout=5.0)

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
            connections[self.using].close()

    def keep_once(self) -> bool:
        """Beat and extend as far as it is time. Answers whether the database could be told."""
        try:
            if time.monotonic() >= self._next_beat:
                nodes.heartbeat(self.using, self.node_id)
                self._next_beat = time.monotonic() + self._beat_seconds
            for domain, leases in self.leases.due(self.domains).items():
                self._extend(domain, leases, self.leases.vt)
        except (DatabaseError, InterfaceError) as error:
            log(logging.WARNING, "database.unreachable", database=self.using, error=str(error).strip())
            connections[self.using].close()
            return False
        return True

    def _extend(self, domain: str, leases: Sequence[Lease], seconds: float) -> set[UUID]:
        asked_at = time.monotonic()
        try:
            kept = self.transitions.extend(domain, leases, seconds)
        except (DatabaseError, InterfaceError):
            connections[self.using].close()  # it may have been lost while nobody used it
            kept = self.transitions.extend(domain, leases, seconds)
        lost = [lease for lease in leases if lease.command_id not in kept]
        self.leases.extended(domain, [lease for lease in leases if lease.command_id in kept], asked_at + seconds)
        self.leases.drop(domain, lost)
        for lease in lost:
            log(logging.WARNING, "lease.lost", domain=domain, command_id=lease.command_id)
        return kept

    def _terminate(self, session: Session) -> None:
        with connections[self.using].cursor() as cursor:
            # Only if it is still the same transaction: behind a pooler the process may serve another client by now.
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND xact_start = %s",
                [session.pid, session.transaction_at],
            )

    def _ask(self, action: Callable[[], Any]) -> Any:
        if threading.current_thread() is self:
            return action()
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
