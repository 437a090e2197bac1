"""Waiting for the reply to a command. It reads what is stored with the command, so it consumes nothing."""

from __future__ import annotations

import asyncio
import json
import math
import time
from datetime import timedelta
from typing import Any
from uuid import UUID

from asgiref.sync import sync_to_async
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from commandbus import install
from commandbus.api import database_of, send_command, uuid_of
from commandbus.exceptions import (
    InvalidCommandError,
    ReplyTimeoutError,
    UncommittedCommandError,
    UnknownCommandError,
)
from commandbus.messages import Reply, Status
from commandbus.models import Command, Domain

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.25
PAUSE_PER_SECOND = 0.1
"""Of the time that has passed: whoever has waited long can wait a little longer, and the database has less to do."""


def wait_for_reply(command_id: UUID, timeout: float, *, domain: str | None = None) -> Reply:
    """Wait up to `timeout` seconds until a command has ended, and answer its reply.

    Raises ReplyTimeoutError, UnknownCommandError, and at once UncommittedCommandError if the command was sent in the
    transaction that is open here, because no worker can see it before the commit. `domain` is needed only where several
    have a command of this id.
    """
    wait = _Wait(command_id, timeout, domain)
    try:
        while (reply := wait.look()) is None:
            time.sleep(wait.pause())
        return reply
    finally:
        wait.end()


async def await_for_reply(command_id: UUID, timeout: float, *, domain: str | None = None) -> Reply:
    """As wait_for_reply; no thread is held meanwhile."""
    wait = _Wait(command_id, timeout, domain)
    try:
        while (reply := await sync_to_async(wait.look)()) is None:
            await asyncio.sleep(wait.pause())
        return reply
    finally:
        await sync_to_async(wait.end)()


def send_command_and_wait(
    domain: str,
    command_type: str,
    command_id: UUID,
    data: dict[str, Any],
    *,
    timeout: float,
    reply_to: str | None = None,
    correlation_id: UUID | None = None,
    delay: float | timedelta | None = None,
    outside_transaction: bool = False,
) -> Reply:
    """Send a command, which commits at once, and wait for its reply.

    To repeat the call after a timeout, or after a crash, does no harm: the command is not sent twice. In a transaction
    it raises UncommittedCommandError, and nothing is sent; in one on another database TransactionMismatchError, unless
    `outside_transaction` asks for it.
    """
    _seconds(timeout)
    _require_no_transaction(domain, command_id)
    send_command(
        domain,
        command_type,
        command_id,
        data,
        reply_to=reply_to,
        correlation_id=correlation_id,
        delay=delay,
        outside_transaction=outside_transaction,
    )
    return wait_for_reply(command_id, timeout, domain=domain)


async def asend_command_and_wait(
    domain: str,
    command_type: str,
    command_id: UUID,
    data: dict[str, Any],
    *,
    timeout: float,
    reply_to: str | None = None,
    correlation_id: UUID | None = None,
    delay: float | timedelta | None = None,
    outside_transaction: bool = False,
) -> Reply:
    _seconds(timeout)
    await sync_to_async(_require_no_transaction)(domain, command_id)
    await sync_to_async(send_command)(
        domain,
        command_type,
        command_id,
        data,
        reply_to=reply_to,
        correlation_id=correlation_id,
        delay=delay,
        outside_transaction=outside_transaction,
    )
    return await await_for_reply(command_id, timeout, domain=domain)


class _Wait:
    def __init__(self, command_id: UUID, timeout: float, domain: str | None) -> None:
        self.command_id = uuid_of(command_id, "command_id")
        self.timeout = _seconds(timeout)
        self.domain = domain
        self.started_at = time.monotonic()
        self._connection: BaseDatabaseWrapper | None = None
        self._own: BaseDatabaseWrapper | None = None

    def look(self) -> Reply | None:
        """The reply, if it is there. Raises when it makes no sense to go on."""
        if self._connection is None:
            self._connection = connections[self._find()]
        status, reply = self._read(self._connection) or (None, None)
        if reply is None and self._own is None and _in_transaction(self._connection):
            self._look_from_outside(self._connection)
            return self.look()
        if status is None:
            raise UnknownCommandError(f"command {self.command_id} was pruned meanwhile, and its reply with it")
        if reply is not None:
            return Reply.from_json(json.loads(reply))
        if time.monotonic() - self.started_at >= self.timeout:
            waits = ": it waits for an operator" if status == Status.IN_TROUBLESHOOTING_QUEUE else ""
            raise ReplyTimeoutError(
                f"no reply to command {self.command_id} within {self.timeout} seconds; its status is {status}{waits}"
            )
        return None

    def pause(self) -> float:
        passed = time.monotonic() - self.started_at
        pause = min(LONGEST_PAUSE, FIRST_PAUSE + PAUSE_PER_SECOND * passed)
        return max(0.0, min(pause, self.timeout - passed))

    def end(self) -> None:
        if self._own is not None:
            self._own.close()

    def _find(self) -> str:
        """The database of the command."""
        using = [database_of(self.domain)] if self.domain else install.databases()
        found = [place for alias in using for place in self._places(alias)]
        if not found:
            where = f"in domain {self.domain!r}" if self.domain else "in any domain"
            raise UnknownCommandError(
                f"there is no command {self.command_id} {where}; it was not sent, not committed, or pruned meanwhile"
            )
        if len(found) > 1:
            names = ", ".join(sorted(domain for _, domain in found))
            raise InvalidCommandError(f"the domains {names} have a command {self.command_id} each; pass domain=…")
        [(alias, self.domain)] = found
        return alias

    def _places(self, using: str) -> list[tuple[str, str]]:
        names = [self.domain] if self.domain else Domain.objects.using(using).values_list("name", flat=True)
        commands = Command.objects.using(using).filter(domain__in=list(names), command_id=self.command_id)
        return [(using, domain) for domain in commands.values_list("domain", flat=True)]

    def _read(self, connection: BaseDatabaseWrapper) -> tuple[str, str | None] | None:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT c.status, commandbus.reply_of(c) FROM command_bus_command AS c"
                " WHERE c.domain = %s AND c.command_id = %s",
                [self.domain, self.command_id],
            )
            row: tuple[str, str | None] | None = cursor.fetchone()
            return row

    def _look_from_outside(self, connection: BaseDatabaseWrapper) -> None:
        """On a connection of our own from now on: what happens outside may be hidden from the open transaction."""
        self._connection = self._own = connection.copy()
        self._own.settings_dict["AUTOCOMMIT"] = True  # from its first statement on, whoever makes that
        if self._read(self._own) is None:
            raise UncommittedCommandError(_uncommitted(self.command_id, connection.alias))


def _require_no_transaction(domain: str, command_id: UUID) -> None:
    connection = connections[database_of(domain)]
    if _in_transaction(connection):
        raise UncommittedCommandError(_uncommitted(command_id, connection.alias))


def _in_transaction(connection: BaseDatabaseWrapper) -> bool:
    return connection.in_atomic_block or not connection.get_autocommit()


def _uncommitted(command_id: UUID, alias: str) -> str:
    return (
        f"no worker can see command {command_id} before the transaction on database {alias!r} commits, so its reply "
        f"cannot come; wait for it after the atomic block"
    )


def _seconds(timeout: object) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < math.inf:
        raise InvalidCommandError(f"timeout must be a number of seconds, 0 or more, not {timeout!r:.100}")
    return float(timeout)
