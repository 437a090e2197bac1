"""What these tests let Spark's processes do. They have none of our tests, so it is sent to them as it is."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pyarrow as pa
from pyspark import TaskContext, cloudpickle
from pyspark.sql.datasource import DataSourceWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from commandbus.spark.options import WriteOptions
from commandbus.spark.source import CommandBusDataSource
from commandbus.spark.task import Target
from commandbus.spark.writer import CommandWriter

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

Batches = Iterator[pa.RecordBatch]


def _task() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise RuntimeError("this runs in a task only")
    return context


def slowly(batches: Batches) -> Batches:
    for batch in batches:
        time.sleep(0.15)
        yield batch


def _disconnecting(batches: Batches, target: Target, note: str) -> Batches:
    """Ends the connections of the job, that of this task among them, when it has sent three batches, and six."""
    for number, batch in enumerate(batches):
        if number in (3, 6):
            with psycopg.connect(**target.parameters, autocommit=True) as connection:  # type: ignore[arg-type]
                row = connection.execute(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                    " WHERE application_name = 'commandbus spark job'"
                ).fetchone()
            with Path(note).open("a") as out:
                out.write(f"{0 if row is None else row[0]}\n")
        yield batch


def fail_once(batches: Batches) -> Batches:
    for number, batch in enumerate(batches):
        if _task().attemptNumber() == 0 and number == 3:
            raise OSError("this attempt fails")
        yield batch


def look(batches: Batches) -> Batches:
    import commandbus

    found = [name for name in ("django", "orjson", "pgmq") if importlib.util.find_spec(name)]
    for batch in batches:
        yield pa.RecordBatch.from_pylist([{"where": commandbus.__file__, "found": str(found)}] * batch.num_rows)


class Source(CommandBusDataSource):
    """As ours, with writers of these tests, which are told the path of a note that they may leave."""

    writes: type[NotedWriter]

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        options = {name: value for name, value in self.options.items() if name.lower() != "note"}
        return self.writes(WriteOptions.of(options), schema, self.options.get("note", ""))


class NotedWriter(CommandWriter):
    def __init__(self, options: WriteOptions, schema: StructType, note: str) -> None:
        super().__init__(options, schema)
        self.note = note


class SlowWriter(NotedWriter):
    """Takes its time between two transactions, and has its connection open all the while."""

    def write(self, iterator: Batches) -> WriterCommitMessage:
        return super().write(slowly(iterator))


class DisconnectedWriter(NotedWriter):
    def write(self, iterator: Batches) -> WriterCommitMessage:
        return super().write(_disconnecting(iterator, self._target, self.note))


class LateWriter(NotedWriter):
    """In the first attempt of the second task, everything is late: it begins when the job has ended."""

    def write(self, iterator: Batches) -> WriterCommitMessage:
        context = _task()
        if context.partitionId() == 0 or context.attemptNumber() > 0:
            return super().write(iterator)
        # It writes under ids that only it has: who does not refuse it has more commands afterwards.
        late = pa.RecordBatch.from_pylist([{"command_type": "Late", "key": "late", "data": "{}"}])
        with psycopg.connect(**self._target.parameters, autocommit=True) as connection:  # type: ignore[arg-type]
            while connection.execute("SELECT 1 FROM command_bus_spark_job WHERE status = 'RUNNING'").fetchone():
                time.sleep(0.02)
        try:
            return super().write(iter([late]))
        except Exception as error:
            Path(self.note).write_text(str(error))
            raise


class SlowSource(Source):
    writes = SlowWriter

    @classmethod
    def name(cls) -> str:
        return "slow"


class DisconnectedSource(Source):
    writes = DisconnectedWriter

    @classmethod
    def name(cls) -> str:
        return "disconnected"


class LateSource(Source):
    writes = LateWriter

    @classmethod
    def name(cls) -> str:
        return "late"
