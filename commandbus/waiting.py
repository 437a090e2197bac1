"""Waiting for something that others write: looking again and again, at growing pauses."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from commandbus.exceptions import InvalidCommandError

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.25
PAUSE_PER_SECOND = 0.1
"""Of the time that has passed: whoever has waited long can wait a little longer, and the database has less to do."""

State = TypeVar("State")
Result = TypeVar("Result")


class Wait(ABC, Generic[State, Result]):
    def __init__(self, timeout: float) -> None:
        self.timeout = seconds(timeout)
        self.started_at = time.monotonic()
        self._connection: BaseDatabaseWrapper | None = None
        self._own: BaseDatabaseWrapper | None = None

    @abstractmethod
    def find(self) -> str:
        """The database that it is in. Raises if it is in none."""

    @abstractmethod
    def read(self, connection: BaseDatabaseWrapper) -> State | None:
        """How it is now; None if it is not there."""

    @abstractmethod
    def result(self, state: State) -> Result | None:
        """What is waited for, if it has come."""

    @abstractmethod
    def gone(self) -> Exception:
        """It was there before."""

    @abstractmethod
    def uncommitted(self, alias: str) -> Exception:
        """Only the open transaction can see it."""

    @abstractmethod
    def late(self, state: State) -> Exception:
        """The time is over."""

    def is_hidden(self, inside: State, outside: State) -> bool:
        """Whether others cannot see what it waits for, because only the open transaction has done it."""
        return False

    def look(self) -> Result | None:
        """The result, if it is there. Raises when it makes no sense to go on."""
        if self._connection is None:
            self._connection = connections[self.find()]
        state = self.read(self._connection)
        result = None if state is None else self.result(state)
        if result is None and self._own is None and in_transaction(self._connection):
            self._look_from_outside(self._connection, state)
            return self.look()
        if state is None:
            raise self.gone()
        if result is None and time.monotonic() - self.started_at >= self.timeout:
            raise self.late(state)
        return result

    def pause(self) -> float:
        passed = time.monotonic() - self.started_at
        pause = min(LONGEST_PAUSE, FIRST_PAUSE + PAUSE_PER_SECOND * passed)
        return max(0.0, min(pause, self.timeout - passed))

    def end(self) -> None:
        if self._own is not None:
            self._own.close()

    def _look_from_outside(self, connection: BaseDatabaseWrapper, inside: State | None) -> None:
        """On a connection of our own from now on: what happens outside may be hidden from the open transaction."""
        self._connection = self._own = connection.copy()
        self._own.settings_dict["AUTOCOMMIT"] = True  # from its first statement on, whoever makes that
        outside = self.read(self._own)
        if outside is None or (inside is not None and self.is_hidden(inside, outside)):
            raise self.uncommitted(connection.alias)


def wait(waiting: Wait[State, Result]) -> Result:
    try:
        while (result := waiting.look()) is None:
            time.sleep(waiting.pause())
        return result
    finally:
        waiting.end()


async def await_(waiting: Wait[State, Result]) -> Result:
    """No thread is held meanwhile."""
    try:
        while (result := await sync_to_async(waiting.look)()) is None:
            await asyncio.sleep(waiting.pause())
        return result
    finally:
        await sync_to_async(waiting.end)()


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    return connection.in_atomic_block or not connection.get_autocommit()


def seconds(timeout: object) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < math.inf:
        raise InvalidCommandError(f"timeout must be a number of seconds, 0 or more, not {timeout!r:.100}")
    return float(timeout)
