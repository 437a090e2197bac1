"""Starts worker processes, replaces them, and cares for what they leave behind. It runs no handler itself."""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass, field, replace
from multiprocessing import connection, get_context, resource_tracker
from multiprocessing.context import SpawnProcess
from types import FrameType
from uuid import UUID, uuid4

from django.db import DatabaseError, InterfaceError, connections

from commandbus.exceptions import ConfigurationError
from commandbus.worker import child
from commandbus.worker.board import Board
from commandbus.worker.domains import databases_of, require_domains, require_pool
from commandbus.worker.log import log
from commandbus.worker.options import Ending, Suspects, WorkerOptions
from commandbus.worker.reload import SourceFiles
from commandbus.worker.reports import LOOK_SECONDS, Death, Reports

TICK_SECONDS = 0.25
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
LONG_LIFE_SECONDS = 60.0
REPORT_SECONDS = 5.0
IDLE_DEATHS = 3
"""So many in a row without a handler running, and what the process has received is suspected of killing it."""
IDLE_SECONDS = 10.0
"""How long an isolated process waits for the next suspect."""


@dataclass
class Child:
    process: SpawnProcess
    node_id: UUID
    board: Board
    started_at: float = field(default_factory=time.monotonic)
    leaving: bool = False
    """It was asked to end, or has asked for a replacement."""
    killed: bool = False
    """By us."""

    def is_running(self, domains: int) -> bool:
        return any(self.board.started(number) for number in range(domains))


@dataclass
class Place:
    """Where one worker process runs, and after it its successor."""

    options: WorkerOptions
    child: Child | None = None
    start_at: float | None = 0.0
    """When the next one is due; None for not at all."""
    pause: float = FIRST_PAUSE
    last: UUID | None = None
    """The node that has been here before."""
    is_retired: bool = False
    """An operator has asked that node to stop: nobody takes its place."""


class Supervisor:
    def __init__(self, options: WorkerOptions, processes: int = 1, *, reload: bool = False, verbosity: int = 1) -> None:
        if processes < 1:
            raise ConfigurationError(f"processes must be 1 or more, not {processes}")
        self.options = options
        self.databases = databases_of(options.domains)
        self.verbosity = verbosity
        names = [options.name] if processes == 1 else [f"{options.name}-{n}" for n in range(1, processes + 1)]
        self._places = [Place(replace(options, name=name, suspects=Suspects.LEAVE)) for name in names]
        self._isolated = Place(
            replace(
                options,
                name=f"{options.name}-isolated",
                suspects=Suspects.ONLY,
                concurrency=1,
                max_commands=None,
                use_notify=False,
                poll_interval=min(options.poll_interval, 0.2),
            ),
            start_at=None,
        )
        self._leaving: list[Child] = []
        self._reports = Reports(self.databases)
        self._files = SourceFiles() if reload else None
        self._signals = 0
        self._look_at = 0.0
        self._suspected_at = 0.0
        self._running_since = 0.0
        self._idle_deaths = 0
        self._empty_at = 0.0
        self._suspects = 0
        self._look_again = False
        """Something was run that nobody looks behind: more may wait by now than the others have found."""

    def run(self) -> int:
        """Until SIGTERM or SIGINT; a second one ends the processes at once. Answers the exit code."""
        self._require_databases()
        resource_tracker.ensure_running()  # it unblocks signals when it starts, so not while we spawn
        self._reports.start()
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while self.run_once():
                connection.wait([one.process.sentinel for one in self._children()], TICK_SECONDS)
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)
        return 1 if self._signals > 1 else 0

    def _require_databases(self) -> None:
        """Raise what is wrong with the configuration. One database of several may be away."""
        aliases = set(self.databases.values())
        for using in aliases:
            require_pool(using, self.options.concurrency)
            try:
                require_domains(using, [domain for domain in self.databases if self.databases[domain] == using])
            except (DatabaseError, InterfaceError) as error:
                if len(aliases) == 1:
                    raise
                log(logging.WARNING, "database.unreachable", database=using, error=str(error).strip())
                connections[using].close()

    def run_once(self) -> bool:
        """Do what is due. Answers whether to go on."""
        for one in list(self._children()):
            if not one.process.is_alive():
                self._bury(one)
        if self._signals or self._is_retired():
            self._stop_all()
        elif time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            self._reload()
            self._look_for_suspects()
        if not self._signals:
            for place in [*self._places, self._isolated]:
                self._fill(place)
        return self._is_busy() or self._starts_again()

    def _is_retired(self) -> bool:
        return all(place.is_retired for place in self._places)

    def _is_busy(self) -> bool:
        return bool(self._children()) or any(place.start_at is not None for place in [*self._places, self._isolated])

    def _starts_again(self) -> bool:
        """All is empty, but there may be suspects, or something that was sent since."""
        if self._signals or self._is_retired():
            return False
        now = time.monotonic()
        self._empty_at = self._empty_at or now
        if not self._reports.has_looked_since(self._empty_at):
            return True
        before, self._suspects = self._suspects, self._reports.suspects()
        self._empty_at = 0.0
        if self._look_again:
            self._look_again = False
            for place in self._places:
                place.start_at = None if place.is_retired else 0.0
            return True
        if not self._suspects or self._suspects == before:
            return False
        self._isolated.start_at = 0.0
        return True

    def _end(self) -> None:
        """Leave no process behind, and nothing that one of them held, if the databases can still be told."""
        for one in self._children():
            self._kill(one)
            self._bury(one)
        self._reports.stop(REPORT_SECONDS)

    def _children(self) -> list[Child]:
        places = [*self._places, self._isolated]
        return [place.child for place in places if place.child is not None] + self._leaving

    def _fill(self, place: Place) -> None:
        if place.child is not None and place.child.board.is_recycling():
            self._replace(place)
        if place.child is None and place.start_at is not None and time.monotonic() >= place.start_at:
            try:
                place.child = self._spawn(place.options)
                place.start_at = None
            except OSError as error:  # no memory, or no file descriptors
                log(logging.ERROR, "process.not_started", name=place.options.name, error=error)
                place.start_at = time.monotonic() + LONGEST_PAUSE

    def _replace(self, place: Place) -> None:
        """Let the next process start while this one finishes what it runs."""
        if place.child is not None:
            place.child.leaving = True
            self._leaving.append(place.child)
            place.child, place.start_at = None, 0.0

    def _spawn(self, options: WorkerOptions) -> Child:
        node_id, board = uuid4(), Board.shared(options.concurrency)
        process = get_context("spawn").Process(
            target=child.run, args=(options, node_id, board.values, self.verbosity), name=options.name
        )
        signal.pthread_sigmask(signal.SIG_BLOCK, child.BLOCKED)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, child.BLOCKED)
        return Child(process, node_id, board)

    def _bury(self, one: Child) -> None:
        """A process has ended. Replace it unless it was asked to end, and remember what it leaves behind."""
        code = one.process.exitcode
        started = {domain: one.board.started(number) for number, domain in enumerate(self.databases)}
        # A handler may also end the process with the exit code of a graceful end.
        died = code not in child.EXIT_CODES.values() or any(started.values())
        recycled = not died and code == child.EXIT_CODES[Ending.RECYCLE]
        if not died or time.monotonic() - one.started_at > LONG_LIFE_SECONDS:
            self._idle_deaths = 0
        if died:
            log(logging.ERROR, "process.died", name=one.process.name, pid=one.process.pid, exit_code=code)
            self._idle_deaths = 0 if any(started.values()) else self._idle_deaths + 1
            if self._idle_deaths >= IDLE_DEATHS:
                started = {domain: [(0, 2**63 - 1)] for domain in self.databases}
            self._reports.add(Death(one.node_id, one.process.pid, started, one.killed))
        asked = not died and code == child.EXIT_CODES[Ending.ASKED]
        if asked or one is self._isolated.child or one in self._leaving:
            self._look_again = self._look_again or one.board.has_fetched()
        if one in self._leaving:
            self._leaving.remove(one)
            return
        [place] = [place for place in [*self._places, self._isolated] if place.child is one]
        place.child, place.last = None, one.node_id
        place.is_retired = asked and place is not self._isolated
        if asked or one.leaving or (not died and not recycled and self.options.until_empty):
            return
        if not died or time.monotonic() - one.started_at > LONG_LIFE_SECONDS:
            place.pause = FIRST_PAUSE
        place.start_at = time.monotonic() + (place.pause if died else 0.0)
        if died:
            place.pause = min(2 * place.pause, LONGEST_PAUSE)

    def _look_for_suspects(self) -> None:
        """Run an isolated process while there are commands that may have killed one."""
        place, now = self._isolated, time.monotonic()
        for one in [*self._places, place]:
            if one.last in self._reports.explained:
                one.pause = FIRST_PAUSE  # its death has a suspect, and will not come back
        is_running = place.child is not None and place.child.is_running(len(self.databases))
        if not is_running:
            self._running_since = now
        if self._reports.suspects():
            self._suspected_at = now
            if place.child is None and place.start_at is None:
                place.start_at = 0.0
            elif now - self._running_since > IDLE_SECONDS and len(self._leaving) < self.options.concurrency:
                self._leave(place)  # when it has ended what it runs; the others need not wait for that
        elif now - self._suspected_at > IDLE_SECONDS and not is_running:
            place.start_at = None
            if place.child is not None and not place.child.leaving:
                self._ask_to_end(place.child)

    def _reload(self) -> None:
        changed = self._files.changed() if self._files else []
        if changed:
            log(logging.INFO, "code.changed", file=changed[0])
            for place in self._places:
                if not place.is_retired:
                    place.pause, place.start_at = FIRST_PAUSE, 0.0
                    self._leave(place)
            self._leave(self._isolated)

    def _leave(self, place: Place) -> None:
        if place.child is not None:
            self._ask_to_end(place.child)
            self._replace(place)

    def _stop_all(self) -> None:
        for place in [*self._places, self._isolated]:
            place.start_at = None
        for one in self._children():
            if self._signals > 1:
                self._kill(one)
            elif not one.leaving:
                self._ask_to_end(one)

    def _ask_to_end(self, one: Child) -> None:
        one.leaving = True
        one.process.terminate()

    def _kill(self, one: Child) -> None:
        """What it held is given back, and nobody is suspected."""
        one.killed = one.leaving = True
        one.process.kill()
        one.process.join()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
