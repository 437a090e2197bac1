"""Starts worker processes, replaces them, and cares for what they leave behind. It runs no handler itself."""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass, field, replace
from multiprocessing import connection, get_context
from multiprocessing.context import SpawnProcess
from types import FrameType
from uuid import UUID, uuid4

from django.db import DatabaseError, InterfaceError, connections

from commandbus.exceptions import ConfigurationError
from commandbus.models import Suspect
from commandbus.transitions import PostgresTransitions
from commandbus.worker import child
from commandbus.worker.board import Board
from commandbus.worker.log import log
from commandbus.worker.options import Ending, Suspects, WorkerOptions
from commandbus.worker.reload import SourceFiles
from commandbus.worker.worker import databases_of, require_domains, require_pool

TICK_SECONDS = 0.25
LOOK_SECONDS = 1.0
"""How often to look for suspects, changed files, and whether the database can be told of a death."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
LONG_LIFE_SECONDS = 60.0
REPORT_TRIES = 5
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


@dataclass
class Place:
    """Where one worker process runs, and after it its successor."""

    options: WorkerOptions
    child: Child | None = None
    start_at: float | None = 0.0
    """When the next one is due; None for not at all."""
    pause: float = FIRST_PAUSE


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
        self._dead: list[Child] = []
        self._files = SourceFiles() if reload else None
        self._signals = 0
        self._look_at = 0.0
        self._report_at = 0.0
        self._suspected_at = 0.0
        self._suspects = 0
        self._was_isolated = False

    def run(self) -> int:
        """Until SIGTERM or SIGINT; a second one ends the processes at once. Answers the exit code."""
        for using in set(self.databases.values()):
            require_domains(using, [domain for domain in self.databases if self.databases[domain] == using])
            require_pool(using, self.options.concurrency)
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while self.run_once():
                connection.wait([one.process.sentinel for one in self._children()], TICK_SECONDS)
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)
        return 1 if self._signals > 1 else 0

    def run_once(self) -> bool:
        """Do what is due. Answers whether to go on."""
        for one in list(self._children()):
            if not one.process.is_alive():
                self._bury(one)
        if self._signals:
            self._stop_all()
        elif time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            self._reload()
            self._look_for_suspects()
        if time.monotonic() >= self._report_at:
            self._report_deaths()
        if not self._signals:
            for place in [*self._places, self._isolated]:
                self._fill(place)
        return self._is_busy() or self._starts_again()

    def _is_busy(self) -> bool:
        return bool(self._children()) or any(place.start_at is not None for place in [*self._places, self._isolated])

    def _starts_again(self) -> bool:
        """All is empty, but there may be suspects, and these may send or leave something when they have run."""
        if self._signals:
            return False
        before, self._suspects = self._suspects, self._count_suspects()
        if self._was_isolated:
            self._was_isolated = False
            for place in self._places:
                place.start_at = 0.0
            return True
        self._was_isolated = bool(self._suspects) and self._suspects != before
        if self._was_isolated:
            self._isolated.start_at = 0.0
        return self._was_isolated

    def _end(self) -> None:
        """Leave no process behind, and nothing that one of them held, if the database can still be told."""
        for one in self._children():
            self._kill(one)
            self._bury(one)
        for _ in range(REPORT_TRIES):
            self._report_deaths()
            if not self._dead:
                return
            time.sleep(LOOK_SECONDS)

    def _children(self) -> list[Child]:
        places = [*self._places, self._isolated]
        return [place.child for place in places if place.child is not None] + self._leaving

    def _fill(self, place: Place) -> None:
        if place.child is not None and place.child.board.is_recycling():
            self._replace(place)
        if place.child is None and place.start_at is not None and time.monotonic() >= place.start_at:
            place.child = self._spawn(place.options)
            place.start_at = None

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
        recycled = code == child.EXIT_CODES[Ending.RECYCLE]
        if code != 0 and not recycled:
            log(logging.ERROR, "process.died", name=one.process.name, pid=one.process.pid, exit_code=code)
            self._dead.append(one)
        if one in self._leaving:
            self._leaving.remove(one)
            return
        [place] = [place for place in [*self._places, self._isolated] if place.child is one]
        place.child = None
        if one.leaving or (code == 0 and self.options.until_empty):
            return
        if code == 0 or recycled or time.monotonic() - one.started_at > LONG_LIFE_SECONDS:
            place.pause = FIRST_PAUSE
        place.start_at = time.monotonic() + (0.0 if recycled else place.pause)
        if not recycled:
            place.pause = min(2 * place.pause, LONGEST_PAUSE)

    def _report_deaths(self) -> None:
        """Give back what dead processes held. If the database cannot be told now, it will be later."""
        for one in list(self._dead):
            try:
                reported = [self._report(one, domain) for domain in self.databases]
            except (DatabaseError, InterfaceError) as error:
                log(logging.WARNING, "death.not_reported", pid=one.process.pid, error=str(error).strip())
                connections.close_all()
                self._report_at = time.monotonic() + LOOK_SECONDS
                return
            if all(reported):
                self._dead.remove(one)

    def _report(self, one: Child, domain: str) -> bool:
        """Answers whether nothing is left to be given back."""
        using = self.databases[domain]
        transitions = PostgresTransitions(using)
        if one.killed:
            transitions.release_unknown(domain, one.node_id, [])
        started = one.board.started(list(self.databases).index(domain))
        released, accused, remaining = transitions.node_died(domain, one.node_id, started)
        log(logging.WARNING, "death.reported", domain=domain, pid=one.process.pid, released=released, suspects=accused)
        if accused:
            # Every death of an isolated process is progress: no long pause after it.
            self._isolated.pause = FIRST_PAUSE
            self._look_at = 0.0
        return remaining == 0

    def _look_for_suspects(self) -> None:
        """Run an isolated process while there are commands that may have killed one."""
        if self._count_suspects():
            self._suspected_at = time.monotonic()
            if self._isolated.child is None and self._isolated.start_at is None:
                self._isolated.start_at = 0.0
        elif time.monotonic() - self._suspected_at > IDLE_SECONDS:
            self._isolated.start_at = None
            if self._isolated.child is not None and not self._isolated.child.leaving:
                self._ask_to_end(self._isolated.child)

    def _count_suspects(self) -> int:
        try:
            return sum(
                Suspect.objects.using(using).filter(domain=domain).count() for domain, using in self.databases.items()
            )
        except (DatabaseError, InterfaceError) as error:
            log(logging.WARNING, "suspects.unknown", error=str(error).strip())
            connections.close_all()
            return 0

    def _reload(self) -> None:
        changed = self._files.changed() if self._files else []
        if changed:
            log(logging.INFO, "code.changed", file=changed[0])
            for place in self._places:
                place.pause = FIRST_PAUSE
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
