"""Sends a DataFrame as commands, and answers what became of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from pyspark.sql import DataFrame

from commandbus import exceptions
from commandbus.exceptions import CommandBusError, ConfigurationError, SparkJobRefusedError
from commandbus.spark.checking import count_rows, require_stable
from commandbus.spark.connection import Session, resolved
from commandbus.spark.jobs import Job, find_job
from commandbus.spark.options import WriteOptions
from commandbus.spark.progress import Show, Watch
from commandbus.spark.rows import check_columns
from commandbus.spark.spark_session import register

OUR_ERROR = re.compile(r"commandbus\.exceptions\.(\w+): (.+)")


def send(df: DataFrame, *, show: Show | None = None, **options: object) -> Job:
    """Send each row of a DataFrame as a command, and answer the job as it ended.

    `options` are those of `format("commandbus")`, in Python's spelling: `job_id` for jobId. `show` is called now and
    then with the job as it is. Raises a CommandBusError; nothing is lost then: to send the same with the same `job_id`
    completes it.
    """
    given = text_of(options)
    wanted = WriteOptions.of(given)
    check_columns(df.schema, wanted.command_type)
    require_stable(df)
    parameters = resolved(wanted.url)
    register(df.sparkSession)
    job_id = wanted.job_id or ""
    with Session(parameters, patience=wanted.retry_seconds) as session:
        earlier = find_job(session, job_id)
    last_run = 0 if earlier is None else earlier.run
    watch = Watch(parameters, job_id, show or (lambda job: None), after_run=last_run)
    try:
        with watch:
            df.write.format("commandbus").mode("append").options(**{**given, "jobId": job_id}).save()
    except Exception as error:
        raise translated(error, f" (job {job_id})") from error
    with Session(parameters, patience=wanted.retry_seconds) as session:
        job = find_job(session, job_id)
    if job is None:
        raise CommandBusError(f"job {job_id!r} was pruned as soon as it had ended")
    if job.run != last_run + 1 or job.status != "COMPLETED":
        raise SparkJobRefusedError(
            f"job {job_id!r} was begun more than once at the same time, by somebody else or because a connection was "
            f"lost, so nobody knows what became of this run; begin it again when it runs no more: nothing is sent twice"
        )
    return job


def count(df: DataFrame, *, all_right: bool) -> int:
    """The rows of a DataFrame that is to be sent; with `all_right`, a row that cannot be is an error."""
    try:
        return count_rows(df, all_right=all_right)
    except CommandBusError:
        raise
    except Exception as error:
        raise translated(error) from error


def translated(error: Exception, remark: str = "") -> Exception:
    """The error of ours that Spark has wrapped, as it was, with a remark; any other as it is."""
    found = OUR_ERROR.search(str(error))
    if found is None:
        return error
    kind = getattr(exceptions, found[1], None)
    return kind(found[2] + remark) if isinstance(kind, type) and issubclass(kind, CommandBusError) else error


def text_of(options: Mapping[str, object]) -> dict[str, str]:
    """Options as Spark takes them."""
    return {_spelled(name): _text(value) for name, value in options.items() if value is not None}


def _spelled(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return json.dumps(value)
    if not isinstance(value, str | int | float):
        raise ConfigurationError(f"an option is text, a number, true or false, or a JSON object, not {value!r:.100}")
    return str(value)
