"""Sending through Spark, as the benchmark drives it. Needs neither Spark nor Java to be imported."""

from __future__ import annotations

import importlib.util
import itertools
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.system import System
from commandbus.exceptions import ConfigurationError
from commandbus.spark import java

FILES = 4
"""Of one dataset, all of one size: so Spark gives each of one or two tasks as many rows."""
COMMANDS, WARM_UP = "commands.parquet", "warm_up.parquet"


def lack_of_spark() -> str | None:
    """What is missing to run it."""
    for package in ("pyspark", "pyarrow"):
        if importlib.util.find_spec(package) is None:
            return f'{package} is not installed: pip install "commandbus[spark]"'
    try:
        java.prepare()
    except ConfigurationError as error:
        return str(error)
    return None


def through_spark(folder: Path, warm_up_url: str, cores: int) -> System:
    """`folder`: of `dataset`. `warm_up_url`: of another database, for the write before the clock starts."""
    options = {"folder": str(folder), "warm_up_url": warm_up_url, "cores": cores}
    return System("Spark", "benchmarks.sides.spark", options=options, environment={"SPARK_LOCAL_IP": "127.0.0.1"})


@contextmanager
def dataset(count: int) -> Iterator[Path]:
    """A folder with as many commands as Parquet, and a hundredth of it to warm up with, as other sides do."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make(folder / COMMANDS, count)
        _make(folder / WARM_UP, max(FILES, count // 100))
        yield folder


def _make(folder: Path, count: int) -> None:
    """The same as `benchmarks.sides.ours` sends with random ids."""
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir()
    starts = [count * part // FILES for part in range(FILES + 1)]
    for first, end in itertools.pairwise(starts):
        rows = end - first
        columns = {
            "command_type": ["io"] * rows,
            "command_id": [str(uuid.uuid4()) for _ in range(rows)],
            "data": [{"n": number, "account": "DE-1", "amount": 10} for number in range(first, end)],
        }
        parquet.write_table(pa.table(columns), folder / f"{first:08}.parquet")
