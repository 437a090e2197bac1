"""Waiting for the reply to a command. It reads what is stored with the command, so it consumes nothing."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any
from uuid import UUID

from asgiref.sync import sync_to_async
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import OuterRef, Subquery

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
from commandbus.waiting import Wait, await_, in_transaction, seconds, wait


def wait_for_reply(command_id: UUID, timeout: float, *, domain: str | None = None) -> Reply:
    """Wait up to `timeout` seconds until a command has ended, and answer its reply.

    Raises ReplyTimeoutError, UnknownCommandError, and at once UncommittedCommandError if the command was sent in the
    transaction that is open here, because no worker can see it before the commit. `domain` is needed only where several
    have a command of this id.
    """
    return wait(_ReplyWait(command_id, timeout, domain))


async def await_for_reply(command_id: UUID, timeout: float, *, domain: str | None = None) -> Reply:
    """As wait_for_reply; no thread is held meanwhile."""
    return await await_(_ReplyWait(command_id, timeout, domain))


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
    seconds(timeout)
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
    seconds(timeout)
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


class _ReplyWait(Wait[tuple[str, str | None], Reply]):
    def __init__(self, command_id: UUID, timeout: float, domain: str | None) -> None:
        super().__init__(timeout)
        self.command_id = uuid_of(command_id, "command_id")
        self.domain = domain

    def find(self) -> str:
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
        row = Subquery(Command.objects.one(OuterRef("name"), self.command_id).values("id"))
        domains = Domain.objects.using(using).alias(row=row).filter(row__isnull=False)
        if self.domain:
            domains = domains.filter(name=self.domain)
        return [(using, name) for name in domains.values_list("name", flat=True)]

    def read(self, connection: BaseDatabaseWrapper) -> tuple[str, str | None] | None:
        with connection.cursor() as cursor:
            cursor.execute(
                # As in CommandQuerySet.one.
                "SELECT c.status, commandbus.reply_of(c) FROM command_bus_command AS c"
                " WHERE c.domain = (SELECT %s) AND c.command_id BETWEEN %s AND %s ORDER BY c.command_id LIMIT 1",
                [self.domain, self.command_id, self.command_id],
            )
            row: tuple[str, str | None] | None = cursor.fetchone()
            return row

    def result(self, state: tuple[str, str | None]) -> Reply | None:
        _, reply = state
        return None if reply is None else Reply.from_json(json.loads(reply))

    def gone(self) -> Exception:
        return UnknownCommandError(f"command {self.command_id} was pruned meanwhile, and its reply with it")

    def uncommitted(self, alias: str) -> Exception:
        return UncommittedCommandError(_uncommitted(self.command_id, alias))

    def late(self, state: tuple[str, str | None]) -> Exception:
        status, _ = state
        waits = ": it waits for an operator" if status == Status.IN_TROUBLESHOOTING_QUEUE else ""
        return ReplyTimeoutError(
            f"no reply to command {self.command_id} within {self.timeout} seconds; its status is {status}{waits}"
        )


def _require_no_transaction(domain: str, command_id: UUID) -> None:
    connection = connections[database_of(domain)]
    if in_transaction(connection):
        raise UncommittedCommandError(_uncommitted(command_id, connection.alias))


def _uncommitted(command_id: UUID, alias: str) -> str:
    return (
        f"no worker can see command {command_id} before the transaction on database {alias!r} commits, so its reply "
        f"cannot come; wait for it after the atomic block"
    )
