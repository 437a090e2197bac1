"""The row of a job in PostgreSQL, from the driver's side."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from commandbus.spark.connection import Session
from commandbus.spark.options import WriteOptions


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as it is at a moment. Counts are those of all its runs."""

    job_id: str
    domain: str
    status: str
    run: int
    batch_id: UUID | None
    rows: int
    """Of the DataFrame; 0 until it has ended."""
    sent: int
    sent_before: int
    """How many of these were sent by earlier runs."""
    duplicate: int
    """Rows whose command was sent before, or stands there twice."""
    rejected: int
    handled_rows: int
    error: str | None

    @classmethod
    def of(cls, now: dict[str, Any]) -> Job:
        return cls(
            job_id=now["job_id"],
            domain=now["domain"],
            status=now["status"],
            run=now["run"],
            batch_id=None if now["batch_id"] is None else UUID(now["batch_id"]),
            rows=now["row_count"],
            sent=now["sent_count"],
            sent_before=now["sent_before"],
            duplicate=now["duplicate_count"],
            rejected=now["rejected_count"],
            handled_rows=now["handled_rows"],
            error=now["error"],
        )


def verify_job(session: Session, options: WriteOptions) -> None:
    """Raises a CommandBusError if there can be no such job, in no domain of this name for example. Writes nothing."""
    session.call("SELECT commandbus.verify_spark_job(%s, %s)::text", [options.job_id or "stream", options.domain])


def open_job(session: Session, options: WriteOptions) -> int:
    """Begin a job, or begin it again; answer the number of the run."""
    batch = options.batch
    [(run,)] = session.call(
        "SELECT commandbus.open_spark_job(%s, %s, %s, %s, %s, %s::jsonb, %s::jsonb)",
        [
            options.job_id,
            options.domain,
            options.atomic,
            None if batch is None else batch.batch_id,
            None if batch is None else batch.name,
            None if batch is None else batch.custom_data,
            None if batch is None else batch.on_complete,
        ],
        however_long=True,  # it removes what a killed run has kept
    )
    return int(run)


def close_job(session: Session, job_id: str, run: int, rows: int, rejected: int, *, reject: bool) -> None:
    session.call(
        "SELECT commandbus.close_spark_job(%s, %s, %s, %s, %s)",
        [job_id, run, rows, rejected, reject],
        however_long=True,
    )


def fail_job(session: Session, job_id: str, run: int, error: str | None) -> None:
    session.call("SELECT commandbus.fail_spark_job(%s, %s, %s)", [job_id, run, error], however_long=True)


def find_job(session: Session, job_id: str) -> Job | None:
    [(now,)] = session.call("SELECT commandbus.spark_job_now(%s)::text", [job_id])
    return None if now is None else Job.of(json.loads(now))
