"""Quick handlers that share a transaction: one commit for many commands, and still effects and ends commit together.

Each runs in a savepoint, and all are ended by one call after the last. Nothing that goes wrong here is held against a
command: whoever fails, or all if the transaction does, is run again alone, and only that counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
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
    """Run a group in one transaction. Answers those that have to be run alone, and whether they get on well together.

    `begin` is told of each command before its handler is called. If the transaction fails early, commands may be left
    in the group. Raises WrittenOffError if the end was decided by others.
    """
    begun: list[Work] = []
    failed: list[tuple[Work, BaseException]] = []
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
    alone = [one for one, _ in failed]
    for one in begun:
        if not any(one is other for other in alone):
            log_completed(one)
    return alone, not any(_is_rivalry(error) for _, error in failed)


def _run_each(
    executor: Executor,
    using: str,
    group: Group,
    start: Callable[[Work], None],
    failed: list[tuple[Work, BaseException]],
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
        callbacks = len(connections[using].run_on_commit)
        _execute(using, "SAVEPOINT commandbus")  # there is no need to release the one before
        try:
            finishes += _run_one(executor, using, one)
            executor.turn.claim()
        except WrittenOffError:
            raise
        except BaseException as error:  # noqa: BLE001 - it comes out again when it is run alone
            executor.turn.claim()
            del connections[using].run_on_commit[callbacks:]
            _execute(using, "ROLLBACK TO SAVEPOINT commandbus")
            transaction.set_rollback(False, using)
            failed.append((one, error))
        _make_robust(connections[using].run_on_commit, callbacks)
    return finishes


def _make_robust(callbacks: list[Any], first: int) -> None:
    """Those of one command must not keep those of the next from being called."""
    callbacks[first:] = [(savepoints, function, True) for savepoints, function, _ in callbacks[first:]]


def _is_rivalry(error: BaseException) -> bool:
    """A deadlock or a lock that did not come: holding the locks of many until the end does not suit these handlers."""
    return str(getattr(error.__cause__, "sqlstate", "")).startswith(("40", "55"))


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
    return one if read is None else one._replace(data=(read(data),))


def _run_one(executor: Executor, using: str, one: Work) -> list[Finish]:
    finishes = executor.call(_readable(one))
    connection = connections[using]
    if connection.needs_rollback or connection.connection.info.transaction_status != TransactionStatus.INTRANS:
        raise _SpoiltError
    return finishes
