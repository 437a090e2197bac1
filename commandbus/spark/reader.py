"""Reads what a job has set aside: `spark.read.format("commandbus").option("table", "rejects")…load()`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from commandbus.exceptions import ConfigurationError, SparkJobRefusedError
from commandbus.spark.connection import Parameters, Session, connected, own_error, resolved
from commandbus.spark.options import known, required, whole_number

READING = ("url", "table", "jobId", "run", "numPartitions")
TEXTS = ("job_id", "command_id", "command_type", "data", "correlation_id", "reply_to", "reason")
REJECTS = f"{', '.join(f'{name} string' for name in TEXTS)}, delay double, rejected_at timestamp"
ARROW = pa.schema(
    [*((name, pa.string()) for name in TEXTS), ("delay", pa.float64()), ("rejected_at", pa.timestamp("us", "UTC"))]
)
"""The same as REJECTS."""
ROWS_AT_A_TIME = 50
"""They may be large: being too large is one of the reasons to set a row aside."""
BATCH_ROWS = 1000
BATCH_BYTES = 4 * 1024 * 1024


@dataclass
class DigestRange(InputPartition):
    """Of the digests of what a run has set aside: they are spread evenly. `end` is None in the last one."""

    run: int
    start: bytes
    end: bytes | None


class RejectsReader(DataSourceReader):
    def __init__(self, options: Mapping[str, str]) -> None:
        given = known(options, READING)
        if (table := required(given, "table", "rejects")) != "rejects":
            raise ConfigurationError(f"the option table must be rejects, not {table!r:.100}")
        self._job_id = required(given, "jobId", "the-id-of-the-job")
        self._run = whole_number(given, "run", 1, 2**31 - 1) if "run" in given else None
        self._partitions = whole_number(given, "numPartitions", 2, 256)
        self._parameters: Parameters = resolved(required(given, "url", "postgresql://user@host:5432/database"))

    def partitions(self) -> Sequence[InputPartition]:
        last_run = self._last_run()
        run = self._run or last_run
        bounds = [bytes([256 * number // self._partitions]) for number in range(self._partitions)]
        return [DigestRange(run, start, end) for start, end in zip(bounds, [*bounds[1:], None], strict=True)]

    def _last_run(self) -> int:
        """That has completed; before one has, the last that has set something aside.

        A run that goes on, or has failed, may have been given what an earlier one had set aside, and met a part of it.
        """
        with Session(self._parameters, patience=0) as session:
            found = session.call(
                "SELECT coalesce(j.completed_run, (SELECT max(r.run) FROM public.command_bus_spark_reject r"
                " WHERE r.job_id = j.job_id), j.run) FROM public.command_bus_spark_job j WHERE j.job_id = %s",
                [self._job_id],
            )
        if not found:
            raise SparkJobRefusedError(f"there is no job {self._job_id!r} in this database; it may have been pruned")
        return int(found[0][0])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, DigestRange)  # noqa: S101 - we made it
        with connected(self._parameters) as connection, connection.transaction():
            try:
                with connection.cursor("rejects") as cursor:
                    cursor.itersize = ROWS_AT_A_TIME
                    cursor.execute(
                        "SELECT job_id, command_id, command_type, data, correlation_id, reply_to, reason, delay,"
                        " rejected_at FROM public.command_bus_spark_reject"
                        " WHERE job_id = %s AND run = %s AND digest >= %s AND (%s::bytea IS NULL OR digest < %s)"
                        " ORDER BY digest",
                        [self._job_id, partition.run, partition.start, partition.end, partition.end],
                    )
                    yield from _batches(cursor)
            except psycopg.Error as error:
                raise own_error(error) from None


def _batches(rows: Iterable[tuple[Any, ...]]) -> Iterator[pa.RecordBatch]:
    """Of so few rows that they fit into the memory of a task, however large they are."""
    kept: list[tuple[Any, ...]] = []
    size = 0
    for row in rows:
        kept.append(row)
        size += len(row[3] or "")
        if len(kept) == BATCH_ROWS or size >= BATCH_BYTES:
            yield _batch(kept)
            kept, size = [], 0
    if kept:
        yield _batch(kept)


def _batch(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = [pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), ARROW, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=ARROW)
