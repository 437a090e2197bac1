"""Runs handlers. What comes out is what is left to tell the database: nothing, if the handler's own transaction did."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from uuid import UUID

from asgiref.sync import async_to_sync
from django.db import DatabaseError, InterfaceError, connections, transaction

from commandbus import conf
from commandbus.exceptions import InvalidCommandError, LeaseLostError, PermanentCommandError, TransientCommandError
from commandbus.handlers import Handler, HandlerFunction
from commandbus.messages import ErrorInfo, Failure, Finish, Lease, Reason, ReceivedCommand, Status, json_object
from commandbus.policies import Classifier, Decision, End, Retry, RetryPolicy, Troubleshoot
from commandbus.transitions import Transitions
from commandbus.worker.context import Context
from commandbus.worker.log import log


@dataclass(frozen=True, slots=True)
class Release:
    """The delivery did not count: give the command back with its attempt."""

    lease: Lease


Outcome = Finish | Failure | Release


@dataclass(frozen=True, slots=True)
class Work:
    """One call of a handler: one command, or several for a bulk handler."""

    domain: str
    handler: Handler | None
    received: tuple[ReceivedCommand, ...]
    fetched_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Executor:
    transitions: Transitions
    using: str | None
    """The database of the handlers' transactions; None where there is none, as in memory."""
    node: str = "test"
    extend: Callable[[str, list[Lease], float], set[UUID]] | None = None
    """How a handler's lease is extended: outside its transaction, which would hide it from all others."""

    def execute(self, work: Work) -> list[Outcome]:
        """Run the handler. Raises nothing that a handler can cause."""
        if work.handler is None:
            return [_no_handler(work, received) for received in work.received]
        broken = [received for received in work.received if not isinstance(received.command.data, Mapping)]
        if broken:
            return [*(_invalid(received) for received in broken), *self._others(work, broken)]
        started = time.monotonic()
        outcomes: list[Outcome]
        try:
            if work.handler.transactional and self.using is not None:
                with _watched_connection(self.using, opens=True):
                    outcomes = self._run_in_transaction(work, work.handler)
            else:
                with _watched_connection(self.using, opens=False):
                    outcomes = list(self._run(work, work.handler))
        except LeaseLostError:
            _log(logging.WARNING, "lease.lost", work)
            # The effects were rolled back. Whoever of the group still has its lease starts again elsewhere.
            return [Release(received.lease) for received in work.received]
        except ConnectionLostError:
            _log(logging.WARNING, "connection.lost", work)
            return [Release(received.lease) for received in work.received]
        except Exception as error:  # noqa: BLE001 - a handler may raise anything
            return [self._after(error, work, work.handler, received) for received in work.received]
        _log(logging.INFO, "command.completed", work, ms=1000 * (time.monotonic() - started))
        return outcomes

    def _others(self, work: Work, broken: Sequence[ReceivedCommand]) -> list[Outcome]:
        rest = tuple(received for received in work.received if received not in broken)
        return self.execute(Work(work.domain, work.handler, rest, work.fetched_at)) if rest else []

    def _run_in_transaction(self, work: Work, handler: Handler) -> list[Outcome]:
        with transaction.atomic(using=self.using):
            finishes = self._run(work, handler)
            # The last statement of the handler's own transaction: its effects and its end commit together.
            done = self.transitions.finish(work.domain, finishes)
            if len(done) < len(finishes):
                raise LeaseLostError(f"{len(finishes) - len(done)} of {len(finishes)} leases ran out")
        return []

    def _run(self, work: Work, handler: Handler) -> list[Finish]:
        context = self._context(work)
        if handler.batch_size is None:
            [received] = work.received
            return [_finish(received, _call(handler, received.command, context))]
        results = _call(handler, [received.command for received in work.received], context)
        if results is None:
            results = [None] * len(work.received)
        if not isinstance(results, Sequence) or len(results) != len(work.received):
            raise PermanentCommandError(
                "INVALID_RESULT",
                f"a bulk handler returns None or one result for each of its {len(work.received)} commands",
            )
        return [_finish(received, result) for received, result in zip(work.received, results, strict=True)]

    def _context(self, work: Work) -> Context:
        leases = [received.lease for received in work.received]

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

    def _after(self, error: Exception, work: Work, handler: Handler, received: ReceivedCommand) -> Outcome:
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


@contextmanager
def _watched_connection(using: str | None, *, opens: bool) -> Iterator[None]:
    """Tell a lost connection from an error of the handler. With `opens`, one that cannot be opened is lost too.

    Django replaces a broken connection silently while it leaves an atomic block, so we look at the one from before.
    """
    if using is None:
        yield
        return
    wrapper = connections[using]
    try:
        if opens:
            wrapper.ensure_connection()
    except (DatabaseError, InterfaceError) as error:
        raise ConnectionLostError from error
    before = wrapper.connection
    try:
        yield
    except (DatabaseError, InterfaceError) as error:
        if before is None or not before.closed:
            raise
        if wrapper.connection is before:
            wrapper.close()
        raise ConnectionLostError from error


def apply(transitions: Transitions, domain: str, outcomes: Sequence[Outcome]) -> None:
    """Tell the database, in one call per kind. Outcomes whose lease was lost meanwhile have no effect."""
    finishes = [outcome for outcome in outcomes if isinstance(outcome, Finish)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    releases = [outcome.lease for outcome in outcomes if isinstance(outcome, Release)]
    if finishes:
        _log_lost(domain, finishes, transitions.finish(domain, finishes))
    if failures:
        statuses = transitions.fail(domain, failures)
        _log_lost(domain, failures, statuses)
        for command_id, status in statuses.items():
            event = "command.retry" if status is Status.PENDING else "command.troubleshooting"
            log(logging.WARNING, event, domain=domain, command_id=command_id)
    if releases:
        transitions.release(domain, releases)


def error_info(error: BaseException) -> ErrorInfo:
    code = getattr(error, "code", None)
    return ErrorInfo(
        type=type(error).__name__,
        code=str(code) if code is not None else type(error).__name__,
        message=str(getattr(error, "message", None) or error),
        details=getattr(error, "details", None) if isinstance(getattr(error, "details", None), Mapping) else None,
        traceback="".join(traceback.format_exception(type(error), error, _handlers_frames(error))),
    )


def _handlers_frames(error: BaseException) -> TracebackType | None:
    """The traceback from the handler on: how we called it is of no interest to who reads it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(("commandbus.", "asgiref.")):
        frames = frames.tb_next
    return frames or error.__traceback__


def _call(handler: Handler, *arguments: object) -> Any:
    """Call the handler and hold it to its timeout. A coroutine is interrupted; a function is judged when it returns."""
    function, timeout = handler.function, handler.timeout
    started = time.monotonic()
    try:
        if inspect.iscoroutinefunction(function):
            return async_to_sync(_within)(timeout, function, *arguments)
        result = function(*arguments)
    except TimeoutError as error:
        if timeout is None or time.monotonic() - started < timeout:
            raise  # the handler's own
        raise _timed_out(handler) from error
    if timeout is not None and time.monotonic() - started > timeout:
        raise _timed_out(handler)
    return result


async def _within(timeout: float | None, function: HandlerFunction, *arguments: object) -> Any:
    async with asyncio.timeout(timeout):
        return await function(*arguments)


def _timed_out(handler: Handler) -> TransientCommandError:
    return TransientCommandError("TIMEOUT", f"the handler {handler.name} took longer than {handler.timeout} seconds")


def _decide(error: Exception, attempt: int, policy: RetryPolicy) -> Decision:
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


def _no_handler(work: Work, received: ReceivedCommand) -> Failure:
    message = f"no handler for {work.domain}/{received.command.command_type} in this worker"
    log(logging.WARNING, "command.no_handler", domain=work.domain, type=received.command.command_type)
    return Failure(received.lease, ErrorInfo("NoHandler", "NO_HANDLER", message), reason=Reason.NO_HANDLER)


def _invalid(received: ReceivedCommand) -> Failure:
    message = f"the data of the message is {received.command.data!r:.200}, not a JSON object"
    return Failure(received.lease, ErrorInfo("InvalidData", "INVALID_DATA", message), reason=Reason.INVALID_DATA)


def _log_lost(domain: str, outcomes: Sequence[Finish | Failure], kept: Any) -> None:
    for outcome in outcomes:
        if outcome.lease.command_id not in kept:
            log(logging.WARNING, "lease.lost", domain=domain, command_id=outcome.lease.command_id)


def _log(level: int, event: str, work: Work, **fields: Any) -> None:
    command = work.received[0].command
    more = {"count": len(work.received)} if len(work.received) > 1 else {}
    log(level, event, domain=work.domain, type=command.command_type, command_id=command.command_id, **more, **fields)
