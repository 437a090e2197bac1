"""What a task does with its rows: it sends them chunk by chunk, each in a transaction that repeats nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from commandbus.exceptions import CommandBusError, InvalidCommandError, SparkJobRefusedError
from commandbus.spark.connection import Parameters, Session
from commandbus.spark.options import OnInvalid, WriteOptions
from commandbus.spark.rows import Chunk, Rows

SEND = (
    "SELECT ordinal, problem FROM commandbus.spark_send(%s, %s, %b::text[], %b::text[], %b::text[], %b::text[],"
    " %b::text[], %b::float8[], %b::text[], %s, %s, %s)"
)


@dataclass(frozen=True)
class Fence:
    """What a task has to show to be let in: the run of the job, or the micro-batch of the stream."""

    job_id: str
    run: int = 1
    stream_query: str | None = None
    stream_run: str | None = None
    stream_batch: int | None = None


@dataclass
class Written(WriterCommitMessage):
    """What a task tells the driver: of attempts that have succeeded, one of each task."""

    rows: int
    rejected: int
    fence: Fence


@dataclass(frozen=True)
class Target:
    """Where rows go. It travels to the executors, so it has no more than they need, and shows no password."""

    parameters: Parameters
    domain: str
    command_type: str | None
    on_invalid: OnInvalid
    chunk_rows: int
    retry_seconds: float

    @classmethod
    def of(cls, parameters: Parameters, options: WriteOptions) -> Target:
        return cls(
            parameters,
            options.domain,
            options.command_type,
            options.on_invalid,
            options.chunk_rows,
            options.retry_seconds,
        )

    def __repr__(self) -> str:
        return f"Target(domain={self.domain!r})"

    def session(self, name: str) -> Session:
        return Session(self.parameters, patience=self.retry_seconds, name=name)

    def send(self, batches: Iterator[pa.RecordBatch], session: Session, fence: Fence) -> Written:
        rows = Rows(self.domain, self.command_type, self.chunk_rows)
        count = rejected = 0
        try:
            for batch in batches:
                for chunk in rows.chunks(batch):
                    rejected += self._send(chunk, session, fence)
                    count += len(chunk)
        except SparkJobRefusedError:  # the job is not ours any more
            raise
        except CommandBusError as error:
            self._note(error, fence)
            raise
        return Written(count, rejected, fence)

    def _note(self, error: CommandBusError, fence: Fence) -> None:
        """For those who look at the job: Spark's own log is on another machine. If that fails, nobody is told."""
        with Session(self.parameters, patience=0) as session, suppress(CommandBusError):
            session.call("SELECT commandbus.note_spark_error(%s, %s, %s)", [fence.job_id, fence.run, str(error)])

    def _send(self, chunk: Chunk, session: Session, fence: Fence) -> int:
        """Answers how many rows were set aside."""
        reject = self.on_invalid == "reject"
        bad = session.call(
            SEND,
            [
                fence.job_id,
                fence.run,
                chunk.command_ids,
                chunk.command_types,
                chunk.data,
                chunk.reply_to,
                chunk.correlation_ids,
                chunk.delays,
                chunk.problems,
                reject,
                fence.stream_run,
                fence.stream_batch,
            ],
        )
        if bad and not reject:
            raise _invalid(chunk, min(bad), len(bad))
        return len(bad)


def _invalid(chunk: Chunk, first: tuple[int, str], count: int) -> InvalidCommandError:
    ordinal, problem = first
    origin = chunk.origin(ordinal - 1)
    named = f" ({origin:.300})" if origin else ""
    context = TaskContext.get()
    partition = "" if context is None else f" of partition {context.partitionId()}"
    more = f" (so do {count - 1} more near it)" if count > 1 else ""
    return InvalidCommandError(
        f"row {chunk.first + ordinal - 1:,}{partition}{named}, command_id {chunk.command_ids[ordinal - 1]!r:.100}, "
        f"type {chunk.command_types[ordinal - 1]!r:.100}, cannot be sent: {problem}{more}; correct it and run the job "
        f"again, or set such rows aside with the option onInvalid=reject (in the shell: --rejects FOLDER)"
    )
