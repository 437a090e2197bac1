"""commandbus through Spark: `df.write.format("commandbus")` in a local session of as many cores as connections."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from benchmarks.side import main
from benchmarks.sides.ours import Ours
from benchmarks.spark import COMMANDS, WARM_UP
from commandbus.spark import session

KIBIBYTE = 1024
WORKERS = ["-m", "pyspark.daemon", "pyspark.worker"]
"""Of tasks, and the process that makes them by forking. Others read what the driver asks of a data source."""


class Spark(Ours):
    def __init__(self, url: str, folder: str, warm_up_url: str, cores: int = 2) -> None:
        super().__init__(url)
        self.folder = Path(folder)
        self.warm_up_url = warm_up_url
        here = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        config = {**here, "spark.ui.enabled": "false", "spark.sql.warehouse.dir": str(self.folder / "warehouse")}
        self.spark = session("benchmark", master=f"local[{cores}]", config=config)
        self.spark.sparkContext.setLogLevel("ERROR")

    def warm_up(self, verb: str, count: int) -> None:
        """In another database. Spark's Java has compiled what it needs then, and the Python workers run."""
        self._write(WARM_UP, self.warm_up_url)

    def fill(self, count: int) -> None:
        """`count` is what the dataset has."""
        self._write(COMMANDS, self.url)

    def figures(self) -> dict[str, float]:
        """The most that one Python worker and Spark's Java have had in memory, in bytes."""
        started = _descendants(os.getpid())
        daemons = {pid for pid in started if _words(pid)[1:] == WORKERS}
        workers = [pid for pid in daemons if started[pid] in daemons]
        return {"worker": max(map(_peak, workers)), "java": max(_peak(pid) for pid in started if _is_java(pid))}

    def _write(self, name: str, url: str) -> None:
        rows = self.spark.read.parquet(str(self.folder / name))
        options = {"url": url, "domain": "bench", "jobId": name}
        rows.write.format("commandbus").mode("append").options(**options).save()


def _descendants(pid: int) -> dict[int, int]:
    """All processes that this one has started, and those that they have, each with the one that started it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found: dict[int, int] = {}
    generation = {pid}
    while generation:
        children = {child: parent for child, parent in parents.items() if parent in generation}
        found |= children
        generation = set(children)
    return found


def _words(pid: int) -> list[str]:
    """What it was started with; nothing, if it has just ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    return []


def _is_java(pid: int) -> bool:
    return Path("".join(_words(pid)[:1])).name == "java"


def _peak(pid: int) -> int:
    """Resident memory, at its highest."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KIBIBYTE
    raise ValueError(f"process {pid} has no memory any more")


if __name__ == "__main__":
    main(Spark)
