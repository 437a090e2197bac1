"""Runs handlers. What comes out is what is left to tell the database: nothing, if the handler's own transaction did."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from commandbus import conf
from commandbus.encoding import json_object
from commandbus.exceptions import InvalidCommandError, InvalidDataError, LeaseLostError, PermanentCommandError
from commandbus.handlers import Handler
from commandbus.messages import (
    Failure,
    Finish,
    Lease,
    Reason,
    ReceivedCommand,
    Status,
)
from commandbus.policies import Classifier, Decision, End, Retry, RetryPolicy, Troubleshoot
from commandbus.transitions import Transitions
from commandbus.typed import Reader, json_kind
from commandbus.worker.call import call, timed_out
from commandbus.worker.context import Context
from commandbus.worker.errors import error_info, invalid_data_info
from commandbus.worker.log import log
from commandbus.worker.log import logger as worker_logger
from commandbus.worker.turn import Session, Turn, WrittenOffError
from commandbus.worker.work import Outcome, Release, Unhandled, Work

LOST_CONNECTIONS = 3
"""How often a command may lose the connection of its handler before that counts as an attempt: it may be the cause."""


@dataclass(frozen=True, slots=True)
class Executor:
    transitions: Transitions
    using: str | None
    """The database of the handlers' transactions; None where there is none, as in memory."""
    node: str = "test"
    extend: Callable[[str, list[Lease], float], set[UUID]] | None = None
    """How a handler's lease is extended: outside its transaction, which would hide it from all others."""
    lost: dict[UUID, int] = field(default_factory=dict)
    """How often each command has lost its connection."""
    turn: Turn = field(default_factory=Turn)
    """By which the call of a handler is watched."""

    def execute(self, work: Work) -> list[Outcome]:
        """Run the handler and answer what is left to tell the database. Raises nothing that a handler can cause."""
        if work.handler is None:
            _log(logging.WARNING, "command.no_handler", work)
            return [Unhandled(lease) for lease in work.leases]
        broken = [received for received in work.received if not isinstance(received.command.data, dict)]
        if broken:
            return [*map(_no_object, broken), *self._others(work, broken)]
        if work.handler.read is not None and work.data is None:
            return self._execute_typed(work, work.handler, work.handler.read)
        started = time.monotonic()
        outcomes: list[Outcome]
        try:
            self.turn.begin(work)
            if work.handler.transactional and self.using is not None:
                _connect(self.using)
                with watched_connection(self.using):
                    outcomes = self._run_in_transaction(work, work.handler)
            else:
                with watched_connection(self.using):
                    outcomes = list(self.call(work))
                self.turn.claim()
        except WrittenOffError:
            _log(logging.WARNING, "handler.late", work)
            return []
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything, also what would end our thread
            return self._after_error(error, work, work.handler)
        if self.lost:
            for received in work.received:
                self.lost.pop(received.command.command_id, None)
        log_completed(work, started)
        return outcomes

    def _execute_typed(self, work: Work, handler: Handler, read: Reader) -> list[Outcome]:
        """With the data as the handler wants it. A command whose data does not fit does not take the others along."""
        outcomes: list[Outcome] = []
        fitting: list[ReceivedCommand] = []
        data: list[Any] = []
        for received in work.received:
            try:
                data.append(read(received.command.data))
                fitting.append(received)
            except InvalidDataError as error:
                outcomes.append(_invalid(received, error))
            except BaseException as error:  # noqa: BLE001 - the application's classes may raise anything
                outcomes.append(self._after(error, work, handler, received))
        self.turn.decided = [*self.turn.decided, *outcomes]
        if fitting:
            outcomes += self.execute(work._replace(received=tuple(fitting), data=tuple(data)))
        return outcomes

    def time_out(self, work: Work) -> list[Outcome]:
        """What becomes of a call that was written off because it took too long."""
        assert work.handler is not None  # noqa: S101 - it has a timeout
        error = timed_out(work.handler)
        return [self._after(error, work, work.handler, received) for received in work.received]

    def _after_error(self, error: BaseException, work: Work, handler: Handler) -> list[Outcome]:
        try:
            self.turn.claim()
        except WrittenOffError:
            _log(logging.WARNING, "handler.late", work)
            return []
        if isinstance(error, LeaseLostError):
            _log(logging.WARNING, "lease.lost", work)
            # Nothing of it was kept. Whoever of the group still has its lease starts again elsewhere.
            return [Release(lease, delay=1.0) for lease in work.leases]
        if isinstance(error, ConnectionLostError):
            _log(logging.WARNING, "connection.lost", work)
            return [self._after_lost_connection(error, work, handler, received) for received in work.received]
        if len(work.received) > 1 and handler.transactional and self.using is not None:
            # Nothing of it was kept. Each alone, so that the one at fault does not take the others along.
            outcomes: list[Outcome] = []
            for one in work.one_by_one():
                made = self.execute(one)
                self.turn.decided = [*self.turn.decided, *made]
                outcomes += made
            return outcomes
        return [self._after(error, work, handler, received) for received in work.received]

    def _others(self, work: Work, broken: Sequence[ReceivedCommand]) -> list[Outcome]:
        rest = tuple(received for received in work.received if received not in broken)
        return self.execute(Work(work.domain, work.handler, rest)) if rest else []

    def _run_in_transaction(self, work: Work, handler: Handler) -> list[Outcome]:
        committed: list[bool] = []
        try:
            with transaction.atomic(using=self.using):
                transaction.on_commit(partial(committed.append, True), using=self.using)  # runs before the handler's
                if handler.timeout is not None:
                    self.turn.session = session_of(transaction.get_connection(self.using))
                self._run_and_finish(work)
        except Exception:
            if not committed:
                raise
            _log(logging.ERROR, "after_commit.raised", work)  # the command has ended; only a callback has failed
            worker_logger.exception("a callback of transaction.on_commit failed")
        return []

    def _run_and_finish(self, work: Work) -> None:
        finishes = self.call(work)
        self.turn.claim()
        # The last statement of the handler's own transaction: its effects and its end commit together.
        done = self.transitions.finish(work.domain, finishes)
        if len(done) < len(finishes):
            raise LeaseLostError(f"{len(finishes) - len(done)} of {len(finishes)} leases ran out")

    def call(self, work: Work) -> list[Finish]:
        """The handler's results. Whatever it raises comes out."""
        handler = work.handler
        assert handler is not None  # noqa: S101 - those without are not called
        self.turn.check()
        if self.using is not None and self.turn.session is None:
            self.turn.session = Session(connections[self.using])
        context = self._context(work)
        if handler.batch_size is None:
            [received], [argument] = work.received, work.arguments
            return [_finish(received, call(handler, argument, context))]
        results = call(handler, work.arguments, context)
        if results is None:
            results = [None] * len(work.received)
        if not isinstance(results, Sequence) or len(results) != len(work.received):
            raise PermanentCommandError(
                "INVALID_RESULT",
                f"a bulk handler returns None or one result for each of its {len(work.received)} commands",
            )
        return [_finish(received, result) for received, result in zip(work.received, results, strict=True)]

    def _context(self, work: Work) -> Context:
        leases = work.leases

        def extend(seconds: float) -> bool:
            extend_all = self.extend or self.transitions.extend
            return len(extend_all(work.domain, leases, seconds)) == len(leases)

        return Context(
            attempt=max(received.attempt for received in work.received),
            max_attempts=min(received.max_attempts for received in work.received),
            node=self.node,
            using=self.using or "",
            extend=extend,
        )

    def _after_lost_connection(
        self, error: Exception, work: Work, handler: Handler, received: ReceivedCommand
    ) -> Outcome:
        command_id = received.command.command_id
        times = self.lost[command_id] = self.lost.get(command_id, 0) + 1
        if times < LOST_CONNECTIONS:
            return Release(received.lease, delay=1.0)
        del self.lost[command_id]
        return self._after(error.__cause__ or error, work, handler, received)

    def _after(self, error: BaseException, work: Work, handler: Handler, received: ReceivedCommand) -> Outcome:
        decision = _decide(error, received.attempt, handler.policy)
        info = error_info(error)
        _log(
            logging.WARNING,
            "command.raised",
            Work(work.domain, handler, (received,)),
            attempt=received.attempt,
            error=info.type,
            code=info.code,
            message=info.message[:200],
            decision=type(decision).__name__.lower(),
        )
        match decision:
            case Retry(delay):
                return Failure(received.lease, info, delay)
            case Troubleshoot():
                return Failure(received.lease, info, reason=Reason.PERMANENT)
            case End(status):
                return Finish(received.lease, status, error=info)


class ConnectionLostError(Exception):
    """It was not the handler that failed but the connection to the database that it runs in."""


IDLE_IN_TRANSACTION = "25P03"  # PostgreSQL has ended the session because of the handler


def session_of(wrapper: BaseDatabaseWrapper) -> Session:
    """The process in PostgreSQL that serves this transaction. Only PostgreSQL knows it, if a pooler is in between."""
    with wrapper.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid(), transaction_timestamp()")
        return Session(wrapper, *cursor.fetchone())


def drop_dead_connection(using: str) -> None:
    """One that was ended while nobody used it, so that no command suffers. Costs nothing if there is no news on it."""
    wrapper = connections[using]
    if wrapper.connection is not None and wrapper.connection.closed:
        wrapper.close()  # a handler that has caught the error left it like this
    if wrapper.connection is not None:
        news = select.poll()
        news.register(wrapper.connection.fileno(), select.POLLIN)
        if news.poll(0) and not wrapper.is_usable():
            wrapper.close()


def _connect(using: str) -> None:
    try:
        connections[using].ensure_connection()
    except (DatabaseError, InterfaceError) as error:
        raise ConnectionLostError from error


@contextmanager
def watched_connection(using: str | None) -> Iterator[None]:
    """Tell a lost connection from an error of the handler.

    Django replaces a broken connection silently while it leaves an atomic block, so we look at the one from before.
    """
    if using is None:
        yield
        return
    wrapper = connections[using]
    before = wrapper.connection
    try:
        yield
    except (DatabaseError, InterfaceError) as error:
        # "broken" is not "closed": a handler that closes its connection itself has not lost it.
        if before is None or not before.broken or getattr(error.__cause__, "sqlstate", None) == IDLE_IN_TRANSACTION:
            raise
        if wrapper.connection is before:
            wrapper.close()
        raise ConnectionLostError from error


def apply(transitions: Transitions, domain: str, outcomes: Sequence[Outcome], *, grace: float | None = None) -> None:
    """Tell the database, in one call per kind. Outcomes whose lease was lost meanwhile have no effect.

    `grace`: how long commands wait for a worker with their handler, if not as long as the settings say.
    """
    finishes = [outcome for outcome in outcomes if isinstance(outcome, Finish)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    releases = [outcome for outcome in outcomes if isinstance(outcome, Release)]
    unhandled = [outcome.lease for outcome in outcomes if isinstance(outcome, Unhandled)]
    if finishes:
        _log_lost(domain, finishes, transitions.finish(domain, finishes))
    if failures:
        statuses = transitions.fail(domain, failures)
        _log_lost(domain, failures, statuses)
        _log_statuses(domain, statuses)
    if unhandled:
        _log_statuses(domain, transitions.unhandled(domain, unhandled, grace))
    for delay in {release.delay for release in releases}:
        transitions.release(domain, [release.lease for release in releases if release.delay == delay], delay)


def _decide(error: BaseException, attempt: int, policy: RetryPolicy) -> Decision:
    return Classifier(conf.current().exceptions).decide(error, attempt, policy)


def _finish(received: ReceivedCommand, result: object) -> Finish:
    if result is None:
        return Finish(received.lease, Status.COMPLETED)
    try:
        json_object(result, "the handler's return value")
    except InvalidCommandError as error:
        raise PermanentCommandError("INVALID_RESULT", str(error)) from None
    assert isinstance(result, Mapping)  # noqa: S101 - json_object has checked it
    return Finish(received.lease, Status.COMPLETED, result)


def _no_object(received: ReceivedCommand) -> Failure:
    message = f"the data of the message is {json_kind(received.command.data)}, not a JSON object"
    return _invalid(received, InvalidDataError([("", message)]))


def _invalid(received: ReceivedCommand, error: InvalidDataError) -> Failure:
    command, info = received.command, invalid_data_info(error)
    log(
        logging.WARNING,
        "command.invalid_data",
        domain=command.domain,
        type=command.command_type,
        command_id=command.command_id,
        message=info.message[:200],
    )
    return Failure(received.lease, info, reason=Reason.INVALID_DATA)


def _log_lost(domain: str, outcomes: Sequence[Finish | Failure], kept: Any) -> None:
    for outcome in outcomes:
        if outcome.lease.command_id not in kept:
            log(logging.WARNING, "lease.lost", domain=domain, command_id=outcome.lease.command_id)


def _log_statuses(domain: str, statuses: Mapping[UUID, Status]) -> None:
    for command_id, status in statuses.items():
        event = "command.retry" if status is Status.PENDING else "command.troubleshooting"
        log(logging.WARNING, event, domain=domain, command_id=command_id)


def log_completed(work: Work, started_at: float | None = None) -> None:
    if worker_logger.isEnabledFor(logging.DEBUG):
        ms = {} if started_at is None else {"ms": 1000 * (time.monotonic() - started_at)}
        _log(logging.DEBUG, "command.completed", work, **ms)


def _log(level: int, event: str, work: Work, **fields: Any) -> None:
    command = work.received[0].command
    more = {"count": len(work.received)} if len(work.received) > 1 else {}
    log(level, event, domain=work.domain, type=command.command_type, command_id=command.command_id, **more, **fields)
