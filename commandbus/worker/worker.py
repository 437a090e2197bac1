"""A worker process: one fetcher, a pool of executors, and for each database a finisher and a keeper."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from uuid import UUID, uuid4

from django.db import DatabaseError, InterfaceError, OperationalError, close_old_connections, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from commandbus import conf, nodes
from commandbus.handlers import HandlerRegistry, registry
from commandbus.pgmq.notify import NOBODY_IDLE_SECONDS, channel, channel_of_node, clear_idle, set_idle, wake
from commandbus.transitions import PostgresTransitions
from commandbus.worker.alarm import Alarm
from commandbus.worker.backlog import Backlog
from commandbus.worker.board import Board
from commandbus.worker.domains import databases_of, require_domains, require_pool
from commandbus.worker.execute import Executor, drop_dead_connection
from commandbus.worker.fetch import RETRY_SECONDS, Fetcher
from commandbus.worker.finish import GROUP, Finisher
from commandbus.worker.keeper import Keeper
from commandbus.worker.leases import Leases
from commandbus.worker.log import log, logger
from commandbus.worker.memory import megabytes
from commandbus.worker.options import Ending, Suspects, WorkerOptions
from commandbus.worker.pace import Pace
from commandbus.worker.seat import Seat
from commandbus.worker.together import run_together
from commandbus.worker.turn import Session, Turn, WrittenOffError
from commandbus.worker.work import Outcome, Release, Work

MOST_UNTOLD = 4 * GROUP
"""How many outcomes may wait for the database before more is fetched."""
STUCK_SECONDS = 1.0
"""How long a thread that was written off may go on until its process is recycled because of it."""


class Worker:
    """Call `run()` in one thread and `stop()` from another."""

    def __init__(
        self,
        options: WorkerOptions,
        handlers: HandlerRegistry = registry,
        *,
        node_id: UUID | None = None,
        board: Board | None = None,
    ) -> None:
        """`board`: shared with a supervisor, if there is one."""
        self.options = options
        self.handlers = handlers
        self.node_id = node_id or uuid4()
        self.databases = databases_of(options.domains)
        self.ending = Ending.STOPPED
        self._supervised = board is not None
        self._board = board or Board.private(options.concurrency)
        self._numbers = {domain: number for number, domain in enumerate(self.databases)}
        self._stopping = threading.Event()
        self._listening = options.use_notify and conf.current().notify != "off"
        self._changed = Alarm(self._channels() if self._listening else {})
        self._pace = Pace()
        self._is_behind = False
        self._lost: dict[UUID, int] = {}
        batches = [handler.batch_size or 1 for domain in self.databases for handler in handlers.in_domain(domain)]
        self._backlog = Backlog(options.concurrency, max(batches, default=1))
        self._leases = Leases(options.vt)
        self._finishers = {using: Finisher(using, self._told) for using in self._aliases()}
        self._keepers = {using: self._keeper(using) for using in self._aliases()}
        self._fetcher = Fetcher(
            options, handlers, self.databases, self.node_id, self._leases, self._keepers, self._is_rid_of_all
        )
        self._seats = [Seat(number) for number in range(options.concurrency)]
        self._written_off: list[tuple[threading.Thread, float]] = []
        self._watching = threading.RLock()

    def run(self) -> Ending:
        self._prepare()
        for thread in [*self._finishers.values(), *self._keepers.values()]:
            thread.start()
        for seat in self._seats:
            self._occupy(seat)
        log(
            logging.INFO,
            "worker.started",
            node=self.options.name,
            domains=",".join(self.databases),
            concurrency=self.options.concurrency,
            vt=self.options.vt,
        )
        try:
            while not self._stopping.is_set():
                if too_soon := self._pace.too_soon():
                    self._stopping.wait(too_soon)
                was_idle = self._is_idle()
                found = self.fetch_once()
                if found == 0:
                    self._wait_for_work(was_idle)
                elif found is None:
                    # We have not said that we are idle, so nobody will wake us, also not from databases that are there.
                    self._sleep(min(self.options.poll_interval, RETRY_SECONDS))
        finally:
            self._stopping.set()
            self._shut_down()
        return self.ending

    def stop(self, ending: Ending = Ending.STOPPED) -> None:
        """Finish what runs, give back the rest, end. For other threads; a signal handler must start one for it."""
        with self._watching:  # what is given back is told before those who tell it are stopped
            if not self._stopping.is_set():
                self.ending = ending
            if ending is Ending.RECYCLE:
                self._board.say_recycling()
            self._stopping.set()
            self._changed.set()
            for seat in self._seats:
                for work in seat.group.take_rest():
                    self._give_back(work)

    def fetch_once(self) -> int | None:
        """Fetch what the executors have room for and answer how much it was; None if we could not look."""
        woken = self._changed.was_notified
        self._changed.clear()  # before we look, so that what comes meanwhile is not missed
        room = self._room()
        if room <= 0 or self._stopping.is_set():
            if woken:
                self._pass_on()
            return None
        works = self._fetcher.fetch(room)
        if works is None:
            return None
        self._backlog.put(works)
        found = sum(len(work.received) for work in works)
        self._pace.looked(found, room, woken=woken)
        if woken and found >= room:
            self._pass_on()
        return found

    def _pass_on(self) -> None:
        """We were woken and leave something behind, or might: let another idle worker look."""
        for domain, using in self.databases.items():
            wake(domain, using)

    def _room(self) -> int:
        room = 0 if self._has_much_to_tell() else self._backlog.room()
        if self.options.max_commands is not None:
            left = self.options.max_commands - self._fetcher.fetched
            room = min(room, left)
            if left <= 0:
                self._board.say_recycling()  # the replacement can start while we finish
                if self._is_idle():
                    self.stop(Ending.RECYCLE)
        return room

    def _has_much_to_tell(self) -> bool:
        """Handlers may outrun the database in taking their outcomes, which cost memory and are unsure until then."""
        self._is_behind = True  # before we look, so that whoever tells the last meanwhile sees it and wakes us
        self._is_behind = self._leases.count() - self._backlog.held() > MOST_UNTOLD
        return self._is_behind

    def _is_idle(self) -> bool:
        return self._backlog.is_idle() and self._leases.is_empty()

    def _wait_for_work(self, was_idle: bool) -> None:
        """Nothing is ready. Say so, look once more, and sleep until something changes."""
        if self.options.until_empty and was_idle:  # before the fetch: else a handler may have sent something since
            self.stop(Ending.EMPTY)
            return
        if self._listening and self._announce_idle():
            return
        self._sleep(self.options.poll_interval)

    def _sleep(self, seconds: float) -> None:
        if not self._stopping.is_set():  # (whoever stops us sets it before the event that a look clears)
            self._changed.wait(seconds)

    def _announce_idle(self) -> bool:
        """Answers whether there was something to do after all, or whether we could not look."""
        self._changed.listen()
        for using in self._aliases():
            try:
                set_idle(self._domains_on(using), self.node_id, using)
            except (DatabaseError, InterfaceError):
                connections[using].close()
        if self.fetch_once() != 0:
            return True
        # A sender may have looked for idle workers just before, and remembers that there were none.
        if self._changed.wait(1.2 * NOBODY_IDLE_SECONDS):
            return True
        return self.fetch_once() != 0

    def _occupy(self, seat: Seat) -> None:
        seat.turn = Turn()
        seat.rise()
        seat.thread = threading.Thread(
            name=f"commandbus-execute-{seat.number}", target=self._execute_loop, args=[seat, seat.turn], daemon=True
        )
        seat.thread.start()

    def _execute_loop(self, seat: Seat, turn: Turn) -> None:
        executors = {domain: self._executor(domain, turn) for domain in self.databases}
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
                    self._give_back(one, delay=0 if self._stopping.is_set() else 1.0)
                self._board.end(seat.number)
                seat.rise()
                self._done(work, ran=ran, spent=turn.spent())
        finally:
            connections.close_all()

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
            alone, well = run_together(executor, self.databases[work.domain], seat.group, partial(self._begin, seat))
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

    def _is_rid_of_all(self) -> bool:
        """Whether every thread that was written off has ended."""
        return not any(thread.is_alive() for thread, _ in self._written_off)

    def _executor(self, domain: str, turn: Turn) -> Executor:
        using = self.databases[domain]
        return Executor(
            PostgresTransitions(using), using, self.options.name, self._keepers[using].extend, self._lost, turn
        )

    def _tell_rest(self, work: Work, outcomes: list[Outcome]) -> None:
        """The call is over. What is in `outcomes` is left to tell, the rest is known."""
        self._tell(work.domain, outcomes)
        if len(outcomes) < len(work.received):
            untold = {outcome.lease for outcome in outcomes}
            self._leases.drop(work.domain, [lease for lease in work.leases if lease not in untold])

    def _done(self, work: Work, *, ran: bool, spent: float) -> None:
        self._backlog.done(work, ran=ran, spent=spent)
        if self._backlog.is_low():
            self._changed.set()

    def _is_ready(self, work: Work) -> bool:
        """Whether the handler can be started: its leases are sure, and the database is there."""
        using = self.databases[work.domain]
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

    def _give_back(self, work: Work, delay: float = 0) -> None:
        self._tell(work.domain, [Release(lease, delay) for lease in work.leases])

    def _tell(self, domain: str, outcomes: list[Outcome]) -> None:
        self._finishers[self.databases[domain]].put(domain, outcomes)

    def _told(self, domain: str, outcomes: list[Outcome]) -> None:
        self._leases.drop(domain, [outcome.lease for outcome in outcomes])
        if self._is_behind or self._leases.is_empty():
            self._changed.set()

    def _keeper(self, using: str) -> Keeper:
        return Keeper(
            using,
            self._domains_on(using),
            self.node_id,
            self._leases,
            register=partial(self._register, using),
            watch=partial(self._watch, using),
        )

    def _watch(self, using: str) -> None:
        """Write off handlers that have taken too long, and recycle the process when it cannot get rid of them.

        Give back commands that wait behind a slow handler: another worker may be idle.
        """
        with self._watching:  # each database has a keeper that calls this
            for surplus in self._backlog.surplus():
                self._give_back(surplus)
            for seat in self._seats:
                if seat.is_slow() and seat.work is not None:
                    self._backlog.split(seat.work, seat.group.take_rest())
            self._write_off_overdue(using)

    def _write_off_overdue(self, using: str) -> None:
        for seat in self._seats:
            overdue = seat.turn.write_off(self._domains_on(using))
            if overdue is not None:
                self._write_off(seat, overdue)
        self._written_off = [(thread, at) for thread, at in self._written_off if thread.is_alive()]
        long_ago = time.monotonic() - (0 if self.options.suspects is Suspects.ONLY else STUCK_SECONDS)
        stuck = [thread for thread, at in self._written_off if at < long_ago]
        if stuck and self._supervised:
            self._recycle("handlers that do not end", count=len(stuck))
        if self.options.max_memory is not None and megabytes() > self.options.max_memory:
            self._recycle("memory", megabytes=megabytes())

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

    def _recycle(self, why: str, **fields: object) -> None:
        if not self._stopping.is_set():
            log(logging.WARNING, "worker.recycled", node=self.options.name, why=why, **fields)
            self.stop(Ending.RECYCLE)

    def _prepare(self) -> None:
        threading.current_thread().name = "commandbus-fetch"
        connection_created.connect(_name_session)
        close_old_connections()
        for using in self._aliases():
            require_pool(using, self.options.concurrency)
        reached = [keeper.keep_once() for keeper in self._keepers.values()]
        if not any(reached):
            raise OperationalError("no database can be reached")

    def _register(self, using: str) -> None:
        domains = self._domains_on(using)
        require_domains(using, domains)
        nodes.register(
            using,
            node_id=self.node_id,
            name=self.options.name,
            role="isolated" if self.options.suspects is Suspects.ONLY else "worker",
            heartbeat_seconds=self._keepers[using].heartbeat_seconds,
            domains=domains,
            handled_types={domain: self.handlers.handled_in(domain) for domain in domains},
        )

    def _aliases(self) -> list[str]:
        return sorted(set(self.databases.values()))

    def _domains_on(self, using: str) -> list[str]:
        return [domain for domain in self.databases if self.databases[domain] == using]

    def _channels(self) -> dict[str, list[str]]:
        """Those to listen on, by the database of the connection that can."""
        channels: dict[str, list[str]] = defaultdict(list)
        for using in self._aliases():
            names = [*map(channel, self._domains_on(using)), channel_of_node(self.node_id)]
            channels[conf.current().listen_database_of(using)] += names
        return channels

    def _shut_down(self) -> None:
        for work in self._backlog.close():
            self._give_back(work)
        self._fetcher.recover()
        while self._is_executing():
            for seat in self._seats:
                if (executor := seat.thread) is not None:
                    executor.join(0.1)  # not for ever: the watch may have put another there
        last: list[Finisher | Keeper] = [*self._finishers.values(), *self._keepers.values()]
        for thread in last:  # the keepers after the finishers: they beat until all is told
            thread.stop()
            thread.join()
        for using in self._aliases():
            self._try(using, partial(clear_idle, self.node_id, using))
            self._try(using, partial(nodes.stopped, using, self.node_id))
        self._changed.close()
        log(logging.INFO, "worker.stopped", node=self.options.name, commands=self._fetcher.fetched)
        if threading.current_thread() is not threading.main_thread():
            connections.close_all()

    def _is_executing(self) -> bool:
        with self._watching:  # whoever is being written off is not forgotten
            return any(seat.thread is not None and seat.thread.is_alive() for seat in self._seats)

    def _try(self, using: str, action: Callable[[], None]) -> None:
        try:
            action()
        except (DatabaseError, InterfaceError) as error:
            log(logging.WARNING, "database.unreachable", database=using, error=str(error).strip())
            connections[using].close()


def _name_session(connection: BaseDatabaseWrapper, **_: object) -> None:
    """Let pg_stat_activity tell which thread of a worker a session belongs to."""
    name = threading.current_thread().name
    if name.startswith("commandbus-"):
        with connection.cursor() as cursor:
            cursor.execute("SELECT set_config('application_name', %s, false)", [name])


def _end_session(session: Session) -> None:
    try:
        session.end()
    except Exception as error:  # noqa: BLE001 - the database may be away, or the handler has closed it itself
        log(logging.WARNING, "session.not_ended", error=error)
