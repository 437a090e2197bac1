"""The executors of a worker process, and what is done about those that do not come back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections

from commandbus.transitions import PostgresTransitions
from commandbus.worker.backlog import Backlog
from commandbus.worker.board import Board
from commandbus.worker.execute import Executor, drop_dead_connection
from commandbus.worker.keeper import Keeper
from commandbus.worker.leases import Leases
from commandbus.worker.log import log, logger
from commandbus.worker.options import WorkerOptions
from commandbus.worker.seat import Seat
from commandbus.worker.together import run_together
from commandbus.worker.turn import Session, Turn, WrittenOffError
from commandbus.worker.work import Outcome, Release, Work


class Pool:
    """A thread in each seat takes work from the backlog until that is closed."""

    def __init__(
        self,
        options: WorkerOptions,
        databases: Mapping[str, str],
        backlog: Backlog,
        leases: Leases,
        board: Board,
        keepers: Mapping[str, Keeper],
        *,
        stopping: threading.Event,
        tell: Callable[[str, list[Outcome]], None],
        is_low: Callable[[], None],
    ) -> None:
        """`tell`: the database, for a domain. `is_low`: called when it is time to fetch."""
        self.lock = threading.RLock()
        """Of whoever takes from the seats what others have put there: the watch, or who stops the worker."""
        self._options = options
        self._databases = databases
        self._backlog = backlog
        self._leases = leases
        self._board = board
        self._keepers = keepers
        self._stopping = stopping
        self._tell = tell
        self._is_low = is_low
        self._numbers = {domain: number for number, domain in enumerate(databases)}
        self._lost: dict[UUID, int] = {}
        self._seats = [Seat(number) for number in range(options.concurrency)]
        self._written_off: list[tuple[threading.Thread, float]] = []

    def start(self) -> None:
        for seat in self._seats:
            self._occupy(seat)

    def give_back_rest(self) -> None:
        """What was taken and not begun."""
        with self.lock:
            for seat in self._seats:
                for work in seat.group.take_rest():
                    self._tell(work.domain, work.released())

    def join(self) -> None:
        """Wait until all have ended. The backlog must be closed."""
        while self._is_executing():
            for seat in self._seats:
                if (executor := seat.thread) is not None:
                    executor.join(0.1)  # not for ever: the watch may have put another there

    def watch(self, domains: Collection[str]) -> None:
        """Write off handlers of these domains that have taken too long.

        Give back commands that wait behind a slow handler: another worker may be idle.
        """
        with self.lock:
            for surplus in self._backlog.surplus():
                self._tell(surplus.domain, surplus.released())
            for seat in self._seats:
                if seat.is_slow() and seat.work is not None:
                    self._backlog.split(seat.work, seat.group.take_rest())
            for seat in self._seats:
                overdue = seat.turn.write_off(domains)
                if overdue is not None:
                    self._write_off(seat, overdue)
            self._written_off = [(thread, at) for thread, at in self._written_off if thread.is_alive()]

    def stuck(self, seconds: float) -> int:
        """How many threads that were written off go on after this time."""
        long_ago = time.monotonic() - seconds
        return sum(at < long_ago for thread, at in self._written_off if thread.is_alive())

    def is_rid_of_all(self) -> bool:
        """Whether every thread that was written off has ended."""
        return not any(thread.is_alive() for thread, _ in self._written_off)

    def _is_executing(self) -> bool:
        with self.lock:  # whoever is being written off is not forgotten
            return any(seat.thread is not None and seat.thread.is_alive() for seat in self._seats)

    def _occupy(self, seat: Seat) -> None:
        seat.turn = Turn()
        seat.rise()
        seat.thread = threading.Thread(
            name=f"commandbus-execute-{seat.number}", target=self._execute_loop, args=[seat, seat.turn], daemon=True
        )
        seat.thread.start()

    def _execute_loop(self, seat: Seat, turn: Turn) -> None:
        executors = {domain: self._executor(domain, turn) for domain in self._databases}
        try:
            while (work := self._backlog.take()) is not None:
                seat.take(work)
                ran = False
                try:
                    ran = self._work_off(seat, work, executors[work.domain])
                except Exception:  # noqa: BLE001 - a signal's receiver, for example; it must not cost us the thread
                    logger.exception("a command could not be run")
                if turn.written_off:
                    return  # another sits here now
                for one in [*seat.running, *seat.group.take_rest()]:
                    self._tell(one.domain, one.released(delay=0 if self._stopping.is_set() else 1.0))
                self._board.end(seat.number)
                seat.rise()
                self._done(work, ran=ran, spent=turn.spent())
        finally:
            connections.close_all()

    def _executor(self, domain: str, turn: Turn) -> Executor:
        using = self._databases[domain]
        extend = self._keepers[using].extend
        return Executor(PostgresTransitions(using), using, self._options.name, extend, self._lost, turn)

    def _work_off(self, seat: Seat, work: Work, executor: Executor) -> bool:
        """Answers whether it was run. What is left in the seat has to be given back."""
        if self._stopping.is_set() or not self._is_ready(work):
            return False
        seat.was_ready()
        if work.may_share_transaction:
            self._run_together(seat, work, executor)
        while not (executor.turn.written_off or self._stopping.is_set()) and (one := seat.group.next()) is not None:
            self._run_one(seat, executor, one)
        return True

    def _run_together(self, seat: Seat, work: Work, executor: Executor) -> None:
        """Work off what can be, and leave in the group what has to be run alone."""
        try:
            alone, well = run_together(executor, self._databases[work.domain], seat.group, partial(self._begin, seat))
        except WrittenOffError:
            log(logging.WARNING, "handler.late", domain=work.domain)
            return
        if not well:
            self._backlog.failed_together(work.received[0].command.command_type)
        self._board.end(seat.number)
        left = {id(one) for one in alone}
        self._leases.drop(work.domain, [lease for one in seat.running if id(one) not in left for lease in one.leases])
        seat.take(work, [*alone, *seat.group.take_rest()])

    def _begin(self, seat: Seat, one: Work) -> None:
        seat.begin(one)
        self._show(seat, one)

    def _show(self, seat: Seat, one: Work) -> None:
        """Let whoever survives us know what runs here."""
        msg_ids = [lease.msg_id for lease in one.leases]
        self._board.start(seat.number, self._numbers[one.domain], min(msg_ids), max(msg_ids))

    def _run_one(self, seat: Seat, executor: Executor, one: Work) -> None:
        """One call of a handler, and what comes out of it."""
        seat.begin(one)
        if not (seat.is_ready() or self._is_ready(one)):
            return
        self._show(seat, one)
        outcomes = executor.execute(one)
        if executor.turn.written_off:
            return
        seat.ended(one)
        self._tell_rest(one, outcomes)

    def _is_ready(self, work: Work) -> bool:
        """Whether the handler can be started: its leases are sure, and the database is there."""
        using = self._databases[work.domain]
        while self._leases.are_sure(work.domain, work.leases):
            drop_dead_connection(using)
            if work.handler is None or not work.handler.transactional:
                return True
            try:
                connections[using].ensure_connection()
                return True
            except (DatabaseError, InterfaceError):
                if self._stopping.wait(0.2):
                    return False
        return False

    def _tell_rest(self, work: Work, outcomes: list[Outcome]) -> None:
        """The call is over. What is in `outcomes` is left to tell, the rest is known."""
        self._tell(work.domain, outcomes)
        if len(outcomes) < len(work.received):
            untold = {outcome.lease for outcome in outcomes}
            self._leases.drop(work.domain, [lease for lease in work.leases if lease not in untold])

    def _done(self, work: Work, *, ran: bool, spent: float) -> None:
        self._backlog.done(work, ran=ran, spent=spent)
        if self._backlog.is_low():
            self._is_low()

    def _write_off(self, seat: Seat, overdue: Work) -> None:
        """The thread goes on until its handler lets go of it. Its command, its seat and its transaction do not wait."""
        turn, thread, work = seat.turn, seat.thread, seat.work or overdue
        begun, rest = seat.running, seat.group.take_rest()
        log(logging.WARNING, "handler.written_off", domain=work.domain, type=overdue.received[0].command.command_type)
        if thread is not None:
            self._written_off.append((thread, time.monotonic()))
        if turn.session is not None:
            threading.Thread(target=_end_session, args=[turn.session], daemon=True).start()
        outcomes: list[Outcome] = []
        if len(overdue.received) > 1 and overdue.handler is not None and overdue.handler.transactional:
            # Nothing of the group was kept. Each alone, so that the late one does not take the others along.
            rest += overdue.one_by_one()
        else:
            outcomes += self._executor(work.domain, Turn()).time_out(overdue)
        # The others did not take too long: they share its transaction, or are bulk commands that were run one by one.
        decided = {outcome.lease: outcome for outcome in turn.decided}
        others = {lease for one in begun for lease in one.leases} - set(overdue.leases) - set(decided)
        outcomes += [*decided.values(), *map(Release, others)]
        self._board.end(seat.number)
        self._tell(work.domain, outcomes)
        self._backlog.put(rest)
        self._done(work, ran=True, spent=turn.overdue_seconds())
        self._occupy(seat)  # after that: at the end of the worker it would find nothing to do, and leave


def _end_session(session: Session) -> None:
    try:
        session.end()
    except Exception as error:  # noqa: BLE001 - the database may be away, or the handler has closed it itself
        log(logging.WARNING, "session.not_ended", error=error)
