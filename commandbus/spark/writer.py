"""Writes a DataFrame: `df.write.format("commandbus").mode("append")…save()`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from commandbus.exceptions import CommandBusError
from commandbus.spark.connection import Session, resolved
from commandbus.spark.jobs import close_job, fail_job, open_job
from commandbus.spark.options import WriteOptions
from commandbus.spark.rows import check_columns
from commandbus.spark.task import Fence, Target, Written


class CommandWriter(DataSourceArrowWriter):
    """Made on the driver, where it begins the job. `write` runs in tasks, `commit` and `abort` on the driver again."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_columns(schema, options.command_type)
        self._target = Target.of(resolved(options.url), options)
        job_id = options.job_id or ""
        with self._target.session(job_id) as session:
            self._fence = Fence(job_id, open_job(session, options))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        with self._target.session(self._fence.job_id) as session:
            return self._target.send(iterator, session, self._fence)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        written = [message for message in messages if isinstance(message, Written)]
        rows, rejected = sum(message.rows for message in written), sum(message.rejected for message in written)
        with self._target.session(self._fence.job_id) as session:
            reject = self._target.on_invalid == "reject"
            try:
                close_job(session, self._fence.job_id, self._fence.run, rows, rejected, reject=reject)
            except CommandBusError as error:
                self._fail(session, str(error))
                raise

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """What was sent stays; to run the job again completes it. If PostgreSQL is away, nobody is told."""
        with self._target.session(self._fence.job_id) as session:
            self._fail(session)

    def _fail(self, session: Session, error: str | None = None) -> None:
        with suppress(CommandBusError):
            fail_job(session, self._fence.job_id, self._fence.run, error)
