"""A worker process: one fetcher, a pool of executors, and for each database a finisher, a keeper and a folder."""

from __future__ import annotations

import logging
import threading
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
from commandbus.worker.alarm import Alarm
from commandbus.worker.backlog import Backlog
from commandbus.worker.board import Board
from commandbus.worker.domains import databases_of, require_domains, require_pool
from commandbus.worker.fetch import RETRY_SECONDS, Fetcher
from commandbus.worker.finish import Finisher
from commandbus.worker.folder import Folder, fold_rest
from commandbus.worker.keeper import Keeper
from commandbus.worker.leases import Leases
from commandbus.worker.log import log
from commandbus.worker.memory import megabytes
from commandbus.worker.options import Ending, Suspects, WorkerOptions
from commandbus.worker.pace import Pace
from commandbus.worker.pool import Pool
from commandbus.worker.work import Outcome

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
        self._stopping = threading.Event()
        self._listening = options.use_notify and conf.current().notify != "off"
        self._changed = Alarm(self._channels() if self._listening else {})
        self._pace = Pace()
        self._waited_for: set[str] = set()
        batches = [handler.batch_size or 1 for domain in self.databases for handler in handlers.in_domain(domain)]
        self._backlog = Backlog(options.concurrency, max(batches, default=1))
        self._leases = Leases(options.vt)
        self._finishers = {using: Finisher(using, self._told) for using in self._aliases()}
        self._keepers = {using: self._keeper(using) for using in self._aliases()}
        self._folders = {using: Folder(using) for using in self._aliases()}
        self._is_folded = False
        self._pool = Pool(
            options,
            self.databases,
            self._backlog,
            self._leases,
            self._board,
            self._keepers,
            stopping=self._stopping,
            tell=self._tell,
            is_low=self._changed.set,
        )
        self._fetcher = Fetcher(
            options,
            handlers,
            self.databases,
            self.node_id,
            self._leases,
            self._keepers,
            is_alone=self._pool.is_rid_of_all,
            is_behind=self._is_behind,
        )

    def run(self) -> Ending:
        thread = threading.current_thread()
        before, thread.name = thread.name, "commandbus-fetch"
        try:
            return self._run()
        finally:
            thread.name = before

    def _run(self) -> Ending:
        self._prepare()
        for thread in [*self._finishers.values(), *self._keepers.values(), *self._folders.values()]:
            thread.start()
        self._pool.start()
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
        with self._pool.lock:  # what is given back is told before those who tell it are stopped
            if not self._stopping.is_set():
                self.ending = ending
            if ending is Ending.RECYCLE:
                self._board.say_recycling()
            self._stopping.set()
            self._changed.set()
            self._pool.give_back_rest()

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
        self._backlog.put(works or [])
        found = sum(len(work.received) for work in works or ())
        if found:
            self._is_folded = False
            self._board.say_fetched()
        if woken and (works is None or self._waited_for or found >= room):
            self._pass_on()
        if works is None:
            return None
        self._pace.looked(found, room, woken=woken)
        return found

    def _pass_on(self) -> None:
        """We were woken and leave something behind, or might: let another idle worker look."""
        for domain, using in self.databases.items():
            wake(domain, using)

    def _room(self) -> int:
        room = self._backlog.room()
        if self.options.max_commands is not None:
            left = self.options.max_commands - self._fetcher.fetched
            room = min(room, left)
            if left <= 0:
                self._board.say_recycling()  # the replacement can start while we finish
                if self._is_idle():
                    self.stop(Ending.RECYCLE)
        return room

    def _is_behind(self, using: str) -> bool:
        """Whether a database has to take outcomes before there is more to do from it."""
        self._waited_for.add(using)  # before we look: whoever tells it something meanwhile sees that, and wakes us
        if not self._finishers[using].is_behind():
            self._waited_for.discard(using)
        return using in self._waited_for

    def _is_idle(self) -> bool:
        return self._backlog.is_idle() and self._leases.is_empty()

    def _wait_for_work(self, was_idle: bool) -> None:
        """Nothing is ready. Say so, look once more, and sleep until something changes."""
        if self.options.until_empty and was_idle:  # before the fetch: else a handler may have sent something since
            self._end_if_folded()
            return
        for folder in self._folders.values():
            folder.fold_soon()
        if self._listening and self._announce_idle():
            return
        self._sleep(self.options.poll_interval)

    def _end_if_folded(self) -> None:
        """End, if the fetch that found nothing came after a look that found nothing to fold: a batch may send more."""
        if self._is_folded:
            self.stop(Ending.EMPTY)
            return
        rest = [fold_rest(using, self._domains_on(using)) for using in self._aliases()]
        self._is_folded = not any(rest)

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

    def _tell(self, domain: str, outcomes: list[Outcome]) -> None:
        self._finishers[self.databases[domain]].put(domain, outcomes)

    def _told(self, domain: str, outcomes: list[Outcome]) -> None:
        self._leases.drop(domain, [outcome.lease for outcome in outcomes])
        if self.databases[domain] in self._waited_for or self._leases.is_empty():
            self._changed.set()

    def _keeper(self, using: str) -> Keeper:
        return Keeper(
            using,
            self._domains_on(using),
            self.node_id,
            self._leases,
            register=partial(self._register, using),
            watch=partial(self._watch, using),
            asked_to_stop=self._asked_to_stop,
        )

    def _asked_to_stop(self) -> None:
        if not self._stopping.is_set():
            log(logging.WARNING, "worker.asked_to_stop", node=self.options.name)
            self.stop(Ending.ASKED)

    def _watch(self, using: str) -> None:
        """Each database has a keeper that calls this."""
        self._pool.watch(self._domains_on(using))
        stuck = self._pool.stuck(0 if self.options.suspects is Suspects.ONLY else STUCK_SECONDS)
        if stuck and self._supervised:
            self._recycle("handlers that do not end", count=stuck)
        if self.options.max_memory is not None and megabytes() > self.options.max_memory:
            self._recycle("memory", megabytes=megabytes())

    def _recycle(self, why: str, **fields: object) -> None:
        if not self._stopping.is_set():
            log(logging.WARNING, "worker.recycled", node=self.options.name, why=why, **fields)
            self.stop(Ending.RECYCLE)

    def _prepare(self) -> None:
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
            self._tell(work.domain, work.released())
        self._fetcher.recover()
        self._pool.join()
        last: list[Finisher | Folder | Keeper] = [*self._finishers.values(), *self._folders.values()]
        last += self._keepers.values()
        for thread in last:  # the keepers in the end: they beat until all is told
            thread.stop()
            thread.join()
        for using in self._aliases():
            self._try(using, partial(clear_idle, self.node_id, using))
            self._try(using, partial(nodes.stopped, using, self.node_id))
        self._changed.close()
        log(logging.INFO, "worker.stopped", node=self.options.name, commands=self._fetcher.fetched)
        if threading.current_thread() is not threading.main_thread():
            connections.close_all()

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
