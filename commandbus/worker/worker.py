"""A worker process: one fetcher, a pool of executors, a finisher, and what keeps them company."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from uuid import UUID

from django.db import DatabaseError, InterfaceError, close_old_connections, connections

from commandbus import conf, install, nodes
from commandbus.exceptions import ConfigurationError
from commandbus.handlers import HandlerRegistry, registry
from commandbus.messages import Lease, ReceivedCommand
from commandbus.models import Domain
from commandbus.pgmq.notify import NOBODY_IDLE_SECONDS, Listener, clear_idle, set_idle
from commandbus.transitions import PostgresTransitions
from commandbus.worker.backlog import Backlog
from commandbus.worker.execute import Executor, Outcome, Release, Work
from commandbus.worker.finish import Finisher
from commandbus.worker.log import log

CONNECTIONS_BESIDE_EXECUTORS = 4  # fetcher, finisher, extender, heartbeat; the listener's is not from Django's pool

RETRY_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    domains: tuple[str, ...]
    concurrency: int = 10
    vt: int = 30
    """Seconds of a lease."""
    use_notify: bool = True
    poll_interval: float = 1.0
    until_empty: bool = False
    """End when nothing is ready and nothing runs."""
    max_commands: int | None = None
    name: str = field(default_factory=socket.gethostname)

    def __post_init__(self) -> None:
        if not self.domains:
            raise ConfigurationError("a worker needs at least one domain")
        for option, least in (("concurrency", 1), ("vt", 1), ("max_commands", 1)):
            value = getattr(self, option)
            if value is not None and value < least:
                raise ConfigurationError(f"{option} must be {least} or more, not {value}")
        if not self.poll_interval > 0:
            raise ConfigurationError(f"poll_interval must be more than 0 seconds, not {self.poll_interval}")


class Worker:
    """Call `run()` in one thread and `stop()` from another."""

    def __init__(self, options: WorkerOptions, handlers: HandlerRegistry = registry) -> None:
        self.options = options
        self.handlers = handlers
        config = conf.current()
        self.databases = {domain: config.database_of(domain) for domain in dict.fromkeys(options.domains)}
        self.aliases = sorted(set(self.databases.values()))
        self.node_ids: dict[str, UUID] = {}
        self._stopping = threading.Event()
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._listening = options.use_notify and config.notify != "off"
        self._lost: dict[UUID, int] = {}
        batches = [handler.batch_size or 1 for domain in self.databases for handler in handlers.in_domain(domain)]
        self._backlog = Backlog(options.concurrency, options.vt, max(batches, default=1))
        self._finishers = {using: Finisher(using) for using in self.aliases}
        self._extender = ThreadPoolExecutor(1, thread_name_prefix="commandbus-extend")
        self._retry_at: dict[str, float] = {}
        self._fetched = 0
        self._next_domain = 0

    def run(self) -> None:
        self._prepare()
        executors = [self._thread(f"execute-{n}", self._execute_loop) for n in range(self.options.concurrency)]
        heart = self._thread("heartbeat", self._heartbeat_loop)
        listeners = self._listeners()
        threads = [*self._finishers.values(), *executors, heart, *listeners]
        for thread in threads:
            thread.start()
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
                was_idle = self._is_idle()
                found = self.fetch_once()
                if found == 0:
                    self._wait_for_work(was_idle)
                elif found is None:
                    self._sleep()
        finally:
            self._stopping.set()
            self._shut_down(executors, listeners, heart)

    def stop(self) -> None:
        """Finish what runs, give back the rest, end. For other threads; a signal handler must start one for it."""
        self._stopping.set()
        self._changed.set()

    def fetch_once(self) -> int | None:
        """Fetch what the executors have room for and answer how much it was; None if we could not look."""
        room = self._room()
        if room <= 0 or self._stopping.is_set():
            return None
        found, complete = 0, True
        domains = list(self.databases)
        first = self._next_domain
        self._next_domain = (first + 1) % len(domains)  # so that one busy domain does not starve another
        for domain in domains[first:] + domains[:first]:
            if room - found > 0:
                fetched = self._fetch(domain, room - found)
                found += fetched or 0
                complete = complete and fetched is not None
        return found if found or complete else None

    def _fetch(self, domain: str, room: int) -> int | None:
        using = self.databases[domain]
        if time.monotonic() < self._retry_at.get(using, 0):
            return None
        try:
            received = PostgresTransitions(using).receive(
                domain, qty=room, vt=self.options.vt, node_id=self.node_ids[using]
            )
        except (DatabaseError, InterfaceError) as error:
            log(logging.WARNING, "fetch.failed", domain=domain, error=str(error).strip())
            connections[using].close()
            self._retry_at[using] = time.monotonic() + RETRY_SECONDS  # other databases need not wait for this one
            return None
        self._fetched += len(received)
        for work in self._group(domain, received):
            self._backlog.put(work)
        return len(received)

    def _group(self, domain: str, received: list[ReceivedCommand]) -> list[Work]:
        """One piece of work per command; for bulk handlers one per batch."""
        works = []
        for command_type, same in groupby(
            sorted(received, key=lambda r: (r.command.command_type, r.lease.msg_id)), lambda r: r.command.command_type
        ):
            handler = self.handlers.get(domain, command_type)
            commands = list(same)
            size = handler.batch_size if handler and handler.batch_size else 1
            works += [
                Work(domain, handler, tuple(commands[start : start + size])) for start in range(0, len(commands), size)
            ]
        return sorted(works, key=lambda work: work.received[0].lease.msg_id)

    def _room(self) -> int:
        room = self._backlog.room()
        if self.options.max_commands is not None:
            room = min(room, self.options.max_commands - self._fetched)
            if self._fetched >= self.options.max_commands and self._is_idle():
                self.stop()
        return room

    def _is_idle(self) -> bool:
        return self._backlog.is_idle() and all(finisher.is_idle() for finisher in self._finishers.values())

    def _wait_for_work(self, was_idle: bool) -> None:
        """Nothing is ready. Say so, look once more, and sleep until something changes."""
        if self.options.until_empty and was_idle:  # before the fetch: else a handler may have sent something since
            self.stop()
            return
        if self._listening and self._announce_idle():
            return
        self._sleep()

    def _sleep(self) -> None:
        self._changed.wait(self.options.poll_interval)
        self._changed.clear()

    def _announce_idle(self) -> bool:
        """Answers whether there was something to do after all."""
        for using in self.aliases:
            domains = [domain for domain in self.databases if self.databases[domain] == using]
            try:
                set_idle(domains, self.node_ids[using], using)
            except (DatabaseError, InterfaceError):
                connections[using].close()
        if self.fetch_once():
            return True
        # A sender may have looked for idle workers just before, and remembers that there were none.
        if self._changed.wait(1.2 * NOBODY_IDLE_SECONDS):
            self._changed.clear()
            return True
        return bool(self.fetch_once())

    def _execute_loop(self) -> None:
        executors = {
            domain: Executor(PostgresTransitions(using), using, self.options.name, self._extend, self._lost)
            for domain, using in self.databases.items()
        }
        try:
            while (work := self._backlog.take()) is not None:
                ready = self._is_ready(work)
                if ready:
                    outcomes = executors[work.domain].execute(work)
                    self._finishers[self.databases[work.domain]].put(work.domain, outcomes)
                else:
                    self._give_back(work)
                self._backlog.done(work, ran=ready)
                for surplus in self._backlog.surplus():
                    self._give_back(surplus)
                if self._backlog.is_low():
                    self._changed.set()
        finally:
            connections.close_all()

    def _is_ready(self, work: Work) -> bool:
        """Whether the handler can be started: it is early enough to be sure of the lease, and the database is there."""
        using = self.databases[work.domain]
        while time.monotonic() - work.fetched_at < self.options.vt / 2:
            if work.handler is None or not work.handler.transactional:
                return True
            try:
                connections[using].ensure_connection()
                return True
            except (DatabaseError, InterfaceError):
                if self._stopping.wait(0.2):
                    return False
        return False

    def _give_back(self, work: Work) -> None:
        releases: list[Outcome] = [Release(received.lease) for received in work.received]
        self._finishers[self.databases[work.domain]].put(work.domain, releases)

    def _extend(self, domain: str, leases: list[Lease], seconds: float) -> set[UUID]:
        """On a connection of its own: in the handler's transaction nobody else would see it."""
        using = self.databases[domain]

        def extend() -> set[UUID]:
            try:
                return PostgresTransitions(using).extend(domain, leases, seconds)
            except (DatabaseError, InterfaceError):
                connections[using].close()  # it may have been lost while nobody used it
                return PostgresTransitions(using).extend(domain, leases, seconds)

        return self._extender.submit(extend).result()

    def _heartbeat_loop(self) -> None:
        try:
            while not self._ended.wait(nodes.HEARTBEAT_SECONDS):
                for using, node_id in self.node_ids.items():
                    self._try(using, partial(nodes.heartbeat, using, node_id))
        finally:
            connections.close_all()

    def _prepare(self) -> None:
        close_old_connections()
        for using in self.aliases:
            self._require_pool(using)
            install.register_domains(using)
            domains = [domain for domain in self.databases if self.databases[domain] == using]
            known = set(Domain.objects.using(using).values_list("name", flat=True))
            for domain in domains:
                if domain not in known:
                    raise ConfigurationError(
                        f"domain {domain!r} is not registered; known: {', '.join(sorted(known)) or 'none'}; "
                        f"add it to COMMANDBUS['DOMAINS'] or write a handler for it"
                    )
            self.node_ids[using] = nodes.register(
                using,
                name=self.options.name,
                role="worker",
                domains=domains,
                handled_types={d: [h.command_type for h in self.handlers.in_domain(d)] for d in domains},
            )

    def _require_pool(self, using: str) -> None:
        pool = connections[using].settings_dict.get("OPTIONS", {}).get("pool")
        if not pool:
            return
        options = pool if isinstance(pool, dict) else {}
        size = options.get("max_size") or options.get("min_size", 4)
        needed = self.options.concurrency + CONNECTIONS_BESIDE_EXECUTORS
        if size < needed:
            raise ConfigurationError(
                f"the connection pool of database {using!r} holds {size} connections, and this worker needs {needed}; "
                f"raise OPTIONS['pool']['max_size'] or lower --concurrency"
            )

    def _listeners(self) -> list[Listener]:
        if not self._listening:
            return []
        return [
            Listener([domain for domain in self.databases if self.databases[domain] == using], using, self._changed)
            for using in self.aliases
        ]

    def _shut_down(self, executors: list[threading.Thread], listeners: list[Listener], heart: threading.Thread) -> None:
        for work in self._backlog.close():
            self._give_back(work)
        for listener in listeners:
            listener.stop()
        for thread in [*executors, *listeners]:
            thread.join()
        self._extender.submit(connections.close_all)
        self._extender.shutdown()
        for finisher in self._finishers.values():
            finisher.stop()
            finisher.join()
        self._ended.set()  # the heart beats until the last handler has ended
        heart.join()
        for using, node_id in self.node_ids.items():
            self._try(using, partial(clear_idle, node_id, using))
            self._try(using, partial(nodes.stopped, using, node_id))
        log(logging.INFO, "worker.stopped", node=self.options.name, commands=self._fetched)
        if threading.current_thread() is not threading.main_thread():
            connections.close_all()

    def _try(self, using: str, action: Callable[[], None]) -> None:
        try:
            action()
        except (DatabaseError, InterfaceError) as error:
            log(logging.WARNING, "database.unreachable", database=using, error=str(error).strip())
            connections[using].close()

    def _thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        return threading.Thread(name=f"commandbus-{name}", target=target, daemon=True)
