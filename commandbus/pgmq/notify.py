"""Wake-ups. A notification carries no data and may be lost: polling always stays on."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from uuid import UUID

import psycopg
from django.db import DatabaseError, InterfaceError, connections, transaction
from psycopg import sql

from commandbus import conf

logger = logging.getLogger(__name__)

NOBODY_IDLE_SECONDS = 0.05
"""How long a sender may remember that nobody was idle. A worker that becomes idle looks once more after this time."""

_nobody_idle_until: dict[tuple[str, str], float] = {}


def channel(domain: str) -> str:
    return f"commandbus.{domain}"


def notify_sent(domain: str, using: str) -> None:
    """Arrange that an idle worker learns of what this transaction has sent."""
    mode = conf.current().notify
    if mode == "in_transaction":
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, '')", [channel(domain)])
    elif mode == "after_commit" and (transaction.get_autocommit(using) or connections[using].in_atomic_block):
        # (A caller that manages transactions by hand has no commit that Django knows of: polling finds the command.)
        transaction.on_commit(partial(wake, domain, using), using=using, robust=True)


def wake(domain: str, using: str) -> bool:
    """Wake one idle worker, if there is one. Never raises: the command is safe, and polling finds it."""
    key = (using, domain)
    if time.monotonic() < _nobody_idle_until.get(key, 0):
        return False
    try:
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT commandbus.wake(%s)", [domain])
            woken = bool(cursor.fetchone()[0])
    except (DatabaseError, InterfaceError) as error:
        logger.warning("wake.failed domain=%s error=%s", domain, error)
        return False
    if not woken:
        _nobody_idle_until[key] = time.monotonic() + NOBODY_IDLE_SECONDS
    return woken


def set_idle(domains: Sequence[str], node_id: UUID, using: str) -> None:
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT commandbus.set_idle(%s::text[], %s)", [list(domains), node_id])


def clear_idle(node_id: UUID, using: str) -> None:
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT commandbus.clear_idle(%s)", [node_id])


class Listener(threading.Thread):
    """Listens on a connection of its own and sets `event` at every notification.

    When the connection breaks it connects again and sets `event`, because notifications may have been missed.
    """

    PING_SECONDS = 10.0

    def __init__(self, domains: Sequence[str], using: str, event: threading.Event) -> None:
        super().__init__(name=f"commandbus-listen-{using}", daemon=True)
        self.domains = list(domains)
        self.using = conf.current().listen_database_of(using)
        self.event = event
        self._ended = threading.Event()
        self._stop_signal, self._stop_sender = socket.socketpair()

    def run(self) -> None:
        pause = 0.1
        while not self._ended.is_set():
            try:
                with self._connect() as connection:
                    self.event.set()
                    pause = 0.1
                    while not self._ended.is_set():
                        self._listen_once(connection)
            except (psycopg.Error, OSError) as error:
                logger.warning("listener.lost database=%s error=%s", self.using, str(error).strip())
                self._ended.wait(pause)
                pause = min(pause * 2, 5.0)
        self._stop_signal.close()

    def stop(self) -> None:
        self._ended.set()
        self._stop_sender.close()  # the other end becomes readable

    def _listen_once(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(self._stop_signal, selectors.EVENT_READ)
            if not selector.select(self.PING_SECONDS):
                connection.execute("SELECT 1")  # a silent connection may be a dead one
        for _ in connection.notifies(timeout=0):
            self.event.set()

    def _connect(self) -> psycopg.Connection[tuple[object, ...]]:
        params = connections[self.using].get_connection_params()
        for not_for_libpq in ("cursor_factory", "context", "prepare_threshold", "pool", "server_side_binding"):
            params.pop(not_for_libpq, None)
        params["application_name"] = self.name
        connection = psycopg.connect(**params, autocommit=True)
        for domain in self.domains:
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel(domain))))
        return connection
