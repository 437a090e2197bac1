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
from commandbus.worker.execute import Executor, Release, Work
from commandbus.worker.finish import Finisher
from commandbus.worker.log import log

CONNECTIONS_BESIDE_EXECUTORS = 4  # fetcher, finisher, extender, heartbeat; the listener's is not from Django's pool


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
    """Call `run()` in one thread and `stop()` from a signal handler or another thread."""

    def __init__(self, options: WorkerOptions, handlers: HandlerRegistry = registry) -> None:
        self.options = options
        self.handlers = handlers
        config = conf.current()
        self.databases = {domain: config.database_of(domain) for domain in dict.fromkeys(options.domains)}
        self.aliases = sorted(set(self.databases.values()))
        self.node_ids: dict[str, UUID] = {}
        self._stopping = threading.Event()
        self._changed = threading.Event()
        batches = [handler.batch_size or 1 for domain in self.databases for handler in handlers.in_domain(domain)]
        self._backlog = Backlog(options.concurrency, options.vt, max(batches, default=1))
        self._finishers = {using: Finisher(using) for using in self.aliases}
        self._extender = ThreadPoolExecutor(1, thread_name_prefix="commandbus-extend")
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
                if not self.fetch_once():
                    self._wait_for_work()
        finally:
            self._stopping.set()
            self._shut_down(executors, [heart, *listeners])

    def stop(self) -> None:
        """Finish what runs, give back the rest, end. Safe to call from a signal handler."""
        self._stopping.set()
        self._changed.set()

    def fetch_once(self) -> int:
        """Fetch what the executors have room for and answer how much it was."""
        room = self._room()
        if room <= 0 or self._stopping.is_set():
            return 0
        found = 0
        domains = list(self.databases)
        for offset in range(len(domains)):
            domain = domains[(self._next_domain + offset) % len(domains)]
            if room - found > 0:
                found += self._fetch(domain, room - found)
        self._next_domain = (self._next_domain + 1) % len(domains)  # so that one busy domain does not starve another
        return found

    def _fetch(self, domain: str, room: int) -> int:
        using = self.databases[domain]
        try:
            received = PostgresTransitions(using).receive(
                domain, qty=room, vt=self.options.vt, node_id=self.node_ids[using]
            )
        except (DatabaseError, InterfaceError) as error:
            log(logging.WARNING, "fetch.failed", domain=domain, error=str(error).strip())
            connections[using].close()
            self._stopping.wait(1.0)
            return 0
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
            if self._fetched >= self.options.max_commands and self._backlog.is_idle():
                self.stop()
        return room

    def _wait_for_work(self) -> None:
        """Nothing was fetched. Say so, look once more, and sleep until something changes."""
        if self._backlog.is_idle():
            if self.options.until_empty:
                self.stop()
                return
            if self.options.use_notify and self._announce_idle():
                return
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
        return self.fetch_once() > 0

    def _execute_loop(self) -> None:
        executors = {
            domain: Executor(PostgresTransitions(using), using, self.options.name, self._extend)
            for domain, using in self.databases.items()
        }
        try:
            while (work := self._backlog.take()) is not None:
                finisher = self._finishers[self.databases[work.domain]]
                if time.monotonic() - work.fetched_at > self.options.vt / 2:
                    # Too late to be sure of the lease: better given back than run twice.
                    finisher.put(work.domain, [Release(received.lease) for received in work.received])
                else:
                    finisher.put(work.domain, executors[work.domain].execute(work))
                self._backlog.done(work)
                if self._backlog.is_low():
                    self._changed.set()
        finally:
            connections.close_all()

    def _extend(self, domain: str, leases: list[Lease], seconds: float) -> set[UUID]:
        transitions = PostgresTransitions(self.databases[domain])
        return self._extender.submit(transitions.extend, domain, leases, seconds).result()

    def _heartbeat_loop(self) -> None:
        try:
            while not self._stopping.wait(nodes.HEARTBEAT_SECONDS):
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
        if not self.options.use_notify or conf.current().notify == "off":
            return []
        return [
            Listener([domain for domain in self.databases if self.databases[domain] == using], using, self._changed)
            for using in self.aliases
        ]

    def _shut_down(self, executors: list[threading.Thread], others: list[threading.Thread]) -> None:
        for work in self._backlog.close():
            released = [Release(received.lease) for received in work.received]
            self._finishers[self.databases[work.domain]].put(work.domain, list(released))
        for thread in others:
            if isinstance(thread, Listener):
                thread.stop()
        for thread in [*executors, *others]:
            thread.join()
        self._extender.submit(connections.close_all)
        self._extender.shutdown()
        for finisher in self._finishers.values():
            finisher.stop()
            finisher.join()
        for using, node_id in self.node_ids.items():
            self._try(using, partial(clear_idle, node_id, using))
            self._try(using, partial(nodes.stopped, using, node_id))
        log(logging.INFO, "worker.stopped", node=self.options.name, commands=self._fetched)

    def _try(self, using: str, action: Callable[[], None]) -> None:
        try:
            action()
        except (DatabaseError, InterfaceError) as error:
            log(logging.WARNING, "database.unreachable", database=using, error=str(error).strip())
            connections[using].close()

    def _thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        return threading.Thread(name=f"commandbus-{name}", target=target, daemon=True)
