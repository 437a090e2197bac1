"""How many jobs the processes of a worker have handled, in memory that the benchmark shares with them.

Standard library only: peers run in an environment of their own. A worker is told the folder in BENCHMARK_COUNTERS.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

FOLDER = "BENCHMARK_COUNTERS"
_SIZE = 16
"""Two numbers, each written at once: how many, and the monotonic clock in nanoseconds at the start of the last one."""


class Counter:
    """Of one process, for any number of threads. Every side's handler calls `handled` first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._entry: memoryview | None = None

    def handled(self, jobs: int = 1) -> None:
        now = time.monotonic_ns()
        with self._lock:
            if self._entry is None:  # not before: the process that imports this may fork those that work
                self._entry = _open(Path(os.environ[FOLDER]) / str(os.getpid()))
            self._count += jobs
            self._entry[1] = now
            self._entry[0] = self._count  # last: whoever reads the count may trust the time


def _open(path: Path) -> memoryview:
    if not path.exists():
        path.write_bytes(bytes(_SIZE))
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), _SIZE)).cast("q")


class Tally:
    """The counters of all processes, for whoever waits for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, memoryview] = {}

    def total(self) -> int:
        return sum(count for count, _ in self._entries())

    def last_started_at(self) -> float:
        """Of the job that was started last, on the monotonic clock, which all processes share."""
        return max((at for _, at in self._entries()), default=0) / 1e9

    def processes(self) -> list[int]:
        return sorted(int(name) for name in self._files)

    def _entries(self) -> list[tuple[int, int]]:
        for entry in os.scandir(self.folder):
            if entry.name not in self._files and entry.stat().st_size == _SIZE:
                self._files[entry.name] = _open(Path(entry.path))
        return [(file[0], file[1]) for file in self._files.values()]
