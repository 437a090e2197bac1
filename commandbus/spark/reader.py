"""Reads what a job has set aside: `spark.read.format("commandbus").option("table", "rejects")…load()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from pyspark.sql.datasource import DataSourceReader, InputPartition

from commandbus.exceptions import ConfigurationError
from commandbus.spark.connection import Parameters, Session, connected, own_error, resolved
from commandbus.spark.options import known, required, whole_number

READING = ("url", "table", "jobId", "numPartitions")
REJECTS = (
    "job_id string, command_id string, command_type string, data string, correlation_id string, reply_to string,"
    " delay double, reason string, rejected_at timestamp"
)
ROWS_AT_A_TIME = 1000


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
        self._partitions = whole_number(given, "numPartitions", 2, 256)
        self._parameters: Parameters = resolved(required(given, "url", "postgresql://user@host:5432/database"))

    def partitions(self) -> Sequence[InputPartition]:
        """Of the last run that has set something aside. What is just being sent may be these rows, corrected."""
        with Session(self._parameters, patience=0) as session:
            [(run,)] = session.call("SELECT max(run) FROM command_bus_spark_reject WHERE job_id = %s", [self._job_id])
        bounds = [bytes([256 * number // self._partitions]) for number in range(self._partitions)]
        return [DigestRange(run or 0, start, end) for start, end in zip(bounds, [*bounds[1:], None], strict=True)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        assert isinstance(partition, DigestRange)  # noqa: S101 - we made it
        with connected(self._parameters) as connection, connection.transaction():
            try:
                with connection.cursor("rejects") as cursor:
                    cursor.itersize = ROWS_AT_A_TIME
                    cursor.execute(
                        "SELECT job_id, command_id, command_type, data, correlation_id, reply_to, delay, reason,"
                        " rejected_at FROM command_bus_spark_reject"
                        " WHERE job_id = %s AND run = %s AND digest >= %s AND (%s::bytea IS NULL OR digest < %s)"
                        " ORDER BY digest",
                        [self._job_id, partition.run, partition.start, partition.end, partition.end],
                    )
                    yield from cursor
            except psycopg.Error as error:
                raise own_error(error) from None
