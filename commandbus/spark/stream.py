"""Writes a stream: `df.writeStream.format("commandbus")…start()`.

Spark makes a new writer for every micro-batch, and another one to commit it. So a writer has no state but its options,
and a task says in its message what is to be committed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from commandbus.spark.connection import resolved
from commandbus.spark.jobs import verify_job
from commandbus.spark.options import WriteOptions
from commandbus.spark.rows import check_columns
from commandbus.spark.task import Fence, Target, Written


class CommandStreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_columns(schema, options.command_type)
        # Spark makes a writer so often that PostgreSQL may well be restarting just then.
        self._target = Target.of(resolved(options.url, options.retry_seconds), options)
        self._job_id = options.job_id
        with self._target.session("stream") as session:
            verify_job(session, options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        fence = self._fence()
        with self._target.session(fence.job_id) as session:
            session.call(
                "SELECT commandbus.open_spark_stream(%s, %s, %s)",
                [fence.job_id, self._target.domain, fence.stream_query],
            )
            return self._target.send(iterator, session, fence)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        written = [message for message in messages if isinstance(message, Written)]
        if not written:
            return
        fence = written[0].fence
        rows, rejected = sum(message.rows for message in written), sum(message.rejected for message in written)
        with self._target.session(fence.job_id) as session:
            session.call(
                "SELECT commandbus.close_spark_stream_batch(%s, %s, %s, %s, %s)",
                [fence.job_id, fence.stream_run, batchId, rows, rejected],
            )

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Nothing has to be undone: Spark sends the micro-batch again, and its commands have the same ids."""

    def _fence(self) -> Fence:
        """The query has an id that outlives a restart, and its run one that does not."""
        query = _said("sql.streaming.queryId")
        number = int(_said("streaming.sql.batchId") or 0)
        return Fence(self._job_id or f"stream-{query}", 1, query, _said("spark.jobGroup.id"), number)


def _said(name: str) -> str:
    """What the query has told its tasks."""
    context = TaskContext.get()
    return (context.getLocalProperty(name) if context is not None else None) or ""
