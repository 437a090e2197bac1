"""What ends the sleep of a fetcher: notifications of PostgreSQL, and other threads of its process."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from django.db import DatabaseError, InterfaceError, connections
from psycopg import sql

from commandbus.worker.log import log

LONGEST_PAUSE = 30.0


class Alarm:
    """Like an Event, but notifications set it too. One thread waits; any thread may set it.

    Unless LISTEN_DATABASES says otherwise, it listens on the connections that the waiting thread has anyway: no process
    and no thread have to wake each other before a command can be fetched.
    """

    PING_SECONDS = 10.0
    """How long a connection may be silent until it is asked whether it lives."""

    def __init__(self, channels: Mapping[str, Sequence[str]]) -> None:
        """`channels`: by the alias of the database. What breaks is reported by setting the alarm."""
        self._channels = channels
        self._listening: dict[str, psycopg.Connection[Any]] = {}
        self._alive_at: dict[str, float] = {}
        self._pauses: dict[str, tuple[float, float]] = {}  # of those that cannot be reached: how long, and until when
        self._lock = threading.Lock()
        self._is_set = False
        self.was_notified = False
        """Since it was last cleared."""
        self._reader, self._writer = os.pipe()  # holds one byte while it is set
        self._close_pipe = weakref.finalize(self, _close, self._reader, self._writer)

    def set(self) -> None:
        with self._lock:
            if not self._is_set and self._close_pipe.alive:
                self._is_set = True
                os.write(self._writer, b"!")

    def is_set(self) -> bool:
        return self._is_set

    def clear(self) -> None:
        self.was_notified = False
        with self._lock:
            if self._is_set and self._close_pipe.alive:
                self._is_set = False
                os.read(self._reader, 1)

    def listen(self) -> None:
        """Make sure that notifications are heard. Whoever cannot be reached is left to polling."""
        for alias, channels in self._channels.items():
            wrapper = connections[alias]
            if wrapper.connection is not None and wrapper.connection is self._listening.get(alias):
                continue
            pause, until = self._pauses.get(alias, (0.5, 0.0))
            if time.monotonic() < until:
                continue
            try:
                wrapper.ensure_connection()
                connection = wrapper.connection
                for channel in channels:
                    connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
            except (DatabaseError, InterfaceError, psycopg.Error) as error:
                pause = min(2 * pause, LONGEST_PAUSE)
                self._pauses[alias] = (pause, time.monotonic() + pause)
                self._lost(alias, error)
                continue
            connection.add_notify_handler(self._hear)  # those that come while it is used for something else
            self._pauses.pop(alias, None)
            self._listening[alias] = connection
            self._alive_at[alias] = time.monotonic()

    def wait(self, seconds: float) -> bool:
        """Until it is set, or for so long. Answers whether it is set."""
        end = time.monotonic() + seconds
        while not self._is_set and (left := end - time.monotonic()) > 0:
            self._ping()
            self._wait_once(min(left, self.PING_SECONDS))
        return self._is_set

    def close(self) -> None:
        """Leave the connections as they were. From then on, setting it does nothing."""
        for alias, connection in self._open().items():
            try:
                connection.remove_notify_handler(self._hear)
                connection.execute("UNLISTEN *")
            except psycopg.Error:
                connections[alias].close()
        self._listening.clear()
        with self._lock:
            self._close_pipe()

    def _wait_once(self, seconds: float) -> None:
        news = select.poll()
        news.register(self._reader, select.POLLIN)
        listening = self._open()
        for connection in listening.values():
            news.register(connection.fileno(), select.POLLIN)
        ready = {descriptor for descriptor, _ in news.poll(1000 * seconds)}
        for alias, connection in listening.items():
            if connection.fileno() in ready:
                self._read(alias, connection)

    def _open(self) -> dict[str, psycopg.Connection[Any]]:
        """Those that are ours: with a pool, another thread may have got one that was closed here."""
        return {
            alias: connection
            for alias, connection in self._listening.items()
            if connections[alias].connection is connection and not connection.closed
        }

    def _read(self, alias: str, connection: psycopg.Connection[Any]) -> None:
        try:
            connection.pgconn.consume_input()
            while connection.pgconn.notifies() is not None:
                self._hear()
            self._alive_at[alias] = time.monotonic()
        except psycopg.Error as error:
            self._lost(alias, error)

    def _ping(self) -> None:
        """A silent connection may be a dead one."""
        for alias, connection in self._open().items():
            if time.monotonic() - self._alive_at[alias] < self.PING_SECONDS:
                continue
            try:
                connection.execute("SELECT 1")
                self._alive_at[alias] = time.monotonic()
            except psycopg.Error as error:
                self._lost(alias, error)

    def _hear(self, _: psycopg.Notify | None = None) -> None:
        self.was_notified = True
        self.set()

    def _lost(self, alias: str, error: Exception) -> None:
        """Something may have been missed: let them look for it. The next `listen` connects again."""
        log(logging.WARNING, "listener.lost", database=alias, error=str(error).strip())
        self._listening.pop(alias, None)
        connections[alias].close()
        self.set()


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
