"""Quick handlers that share a transaction: one commit for many commands, and still effects and ends commit together.

Each runs in a savepoint, and all are ended by one call after the last. Nothing that goes wrong here is held against a
command: whoever fails, or all if the transaction does, is run again alone, and only that counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, LiteralString

from django.db import connections, transaction
from psycopg.pq import TransactionStatus

from commandbus.exceptions import InvalidDataError, LeaseLostError
from commandbus.messages import Finish
from commandbus.worker.execute import Executor, log_completed, session_of, watched_connection
from commandbus.worker.group import Group
from commandbus.worker.log import log, logger
from commandbus.worker.turn import Session, WrittenOffError
from commandbus.worker.work import Work


class _SpoiltError(Exception):
    """The handler has returned, but the transaction cannot go on: it has marked it for rollback, or hidden an error."""


def run_together(
    executor: Executor, using: str, group: Group, begin: Callable[[Work], None]
) -> tuple[list[Work], bool]:
    """Run a group in one transaction. Answers those that have to be run alone, and whether the transaction was kept.

    `begin` is told of each command before its handler is called. If the transaction fails early, commands may be left
    in the group. Raises WrittenOffError if the end was decided by others.
    """
    begun: list[Work] = []
    failed: list[Work] = []
    committed: list[bool] = []

    def start(one: Work) -> None:
        begun.append(one)
        begin(one)

    try:
        with watched_connection(using), transaction.atomic(using=using):
            transaction.on_commit(partial(committed.append, True), using=using)
            finishes = _run_each(executor, using, group, start, failed)
            if finishes:
                domain = begun[0].domain
                done = executor.transitions.finish(domain, finishes)
                if len(done) < len(finishes):
                    raise LeaseLostError(f"{len(finishes) - len(done)} of {len(finishes)} leases ran out")
    except WrittenOffError:
        raise
    except BaseException as error:  # noqa: BLE001 - handlers may raise anything
        if not committed:
            executor.turn.claim()
            if begun:
                log(logging.INFO, "group.failed", domain=begun[0].domain, count=len(begun), error=type(error).__name__)
            return begun, False
        logger.exception("a callback of transaction.on_commit failed")
    return failed, True


def _run_each(
    executor: Executor, using: str, group: Group, start: Callable[[Work], None], failed: list[Work]
) -> list[Finish]:
    finishes: list[Finish] = []
    session: Session | None = None
    while (one := group.next()) is not None:
        start(one)
        handler = one.handler
        assert handler is not None  # noqa: S101 - others are not grouped
        executor.turn.begin(one)
        if handler.timeout is not None:
            session = session or session_of(connections[using])
            executor.turn.session = session
        callbacks: list[Any] = connections[using].run_on_commit
        before = len(callbacks)
        _execute(using, "SAVEPOINT commandbus")  # there is no need to release the one before
        try:
            finishes += _run_one(executor, using, one)
            executor.turn.claim()
        except WrittenOffError:
            raise
        except BaseException:  # noqa: BLE001 - it comes out again when it is run alone
            executor.turn.claim()
            del callbacks[before:]
            _execute(using, "ROLLBACK TO SAVEPOINT commandbus")
            transaction.set_rollback(False, using)
            failed.append(one)
        # "Robust": the callbacks of one command must not keep those of the next from being called.
        callbacks[before:] = [(savepoints, function, True) for savepoints, function, _ in callbacks[before:]]
    return finishes


def _execute(using: str, statement: LiteralString) -> None:
    wrapper = connections[using]
    with wrapper.wrap_database_errors:
        wrapper.connection.execute(statement)


def _readable(one: Work) -> Work:
    """With the data as the handler wants it. If they do not fit, that comes out when it is run alone."""
    data = one.received[0].command.data
    if not isinstance(data, Mapping):
        raise InvalidDataError([("", "no object")])
    read = one.handler.read if one.handler else None
    return one if read is None else replace(one, data=(read(data),))


def _run_one(executor: Executor, using: str, one: Work) -> list[Finish]:
    finishes = executor.call(_readable(one))
    connection = connections[using]
    if connection.needs_rollback or connection.connection.info.transaction_status != TransactionStatus.INTRANS:
        raise _SpoiltError
    log_completed(one)
    return finishes
