"""`send` from files, for people: reads, checks, shows how far it is, and ends with a table."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO
from urllib.parse import unquote
from uuid import uuid5

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from commandbus.exceptions import CommandBusError, ConfigurationError
from commandbus.spark.connection import parameters_of
from commandbus.spark.jobs import Job
from commandbus.spark.mapping import Input, commands_of
from commandbus.spark.options import JOBS
from commandbus.spark.progress import Bar
from commandbus.spark.rows import check_columns
from commandbus.spark.sending import count, send
from commandbus.spark.spark_session import session
from commandbus.text import plain, table

INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class SendJob:
    source: Input
    url: str
    domain: str
    options: Mapping[str, object] = field(default_factory=dict)
    """Further ones of `commandbus.spark.send`."""
    rejects: str | None = None
    """A folder for what is set aside, as JSON lines."""
    check: bool = True
    master: str | None = None
    config: Mapping[str, str] = field(default_factory=dict)


def run(job: SendJob, out: TextIO, err: TextIO) -> int:
    """Answers the exit code: 1 if rows were set aside. Raises a CommandBusError if it cannot be done."""
    parameters_of(job.url)
    if job.rejects is not None and Path(job.rejects).exists():
        raise ConfigurationError(f"--rejects {job.rejects} exists already; name a folder that is still to be made")
    # Spark writes what it is asked for onto the terminal, too. The errors are ours to tell.
    logging.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    config = {"spark.ui.showConsoleProgress": "false", **job.config}
    spark = session(f"commandbus send {job.domain}", master=job.master, config=config)
    is_local = (spark.sparkContext.master or "").startswith("local")
    # A cluster has more to say: that it has no room for the job, for example.
    spark.sparkContext.setLogLevel(job.config.get("spark.log.level", "OFF" if is_local else "WARN"))
    return _Run(job, spark, out, err).run()


class _Run:
    def __init__(self, job: SendJob, spark: SparkSession, out: TextIO, err: TextIO) -> None:
        self._job = job
        self._spark = spark
        self._out = out
        self._err = err
        self._started_at = time.monotonic()

    def run(self) -> int:
        job_id = str(self._job.options.get("job_id") or "")
        bar = Bar(self._err, None)
        try:
            df = commands_of(self._spark, self._job.source, self._job.domain)
            job_id = job_id or _job_id(self._job, df)
            self._say(f"job {job_id}")
            bar = Bar(self._err, self._count(df))
            done = self._send(df, job_id, bar)
            self._keep_rejects(done)
        except KeyboardInterrupt:
            bar.leave()
            self._say(f"interrupted; what was sent stays, and the same command again goes on (job {job_id})")
            return INTERRUPTED
        except CommandBusError:
            bar.leave()
            raise
        except (PySparkException, Py4JError) as error:
            bar.leave()
            raise CommandBusError(f"Spark has given up: {_reason(error)}") from error
        bar.end(done)
        self._out.write("\n".join(self._summary(done)) + "\n")
        return 1 if done.rejected else 0

    def _count(self, df: DataFrame) -> int | None:
        check_columns(df.schema, None)
        if not self._job.check:
            return None
        return count(df, all_right=self._job.options.get("on_invalid") != "reject")

    def _send(self, df: DataFrame, job_id: str, bar: Bar) -> Job:
        options = {**self._job.options, "job_id": job_id}
        return send(df, url=self._job.url, domain=self._job.domain, show=bar.show, **options)

    def _keep_rejects(self, done: Job) -> None:
        if self._job.rejects is None or not done.rejected:
            return
        reader = self._spark.read.format("commandbus").options(table="rejects", url=self._job.url, jobId=done.job_id)
        reader.load().drop("job_id").coalesce(1).write.json(self._job.rejects)
        self._say(f"what was set aside is in {self._job.rejects}")

    def _summary(self, done: Job) -> list[str]:
        rows = [
            ("sent", f"{done.sent:,}"),
            *([("  of these by earlier runs", f"{done.sent_before:,}")] if done.sent_before else []),
            ("duplicate", f"{done.duplicate:,}"),
            ("rejected", f"{done.rejected:,}"),
            ("seconds", f"{time.monotonic() - self._started_at:.1f}"),
        ]
        lines = table(rows[0], rows[1:], right=[1])
        return [*lines, *([f"batch {done.batch_id}"] if done.batch_id is not None else [])]

    def _say(self, line: str) -> None:
        self._err.write(f"{plain(line)}\n")
        self._err.flush()


def _reason(error: Exception) -> str:
    """What Spark says in the end, of all that it says: the causes come last."""
    causes = re.findall(r"^(?:\S+: )?Caused by: (?:\S+: )?([^\n]+)", str(error), re.MULTILINE)
    reasons = causes or re.findall(r"\[[A-Z][A-Z_.]+\] [^\n]+", str(error))
    return str(reasons[-1] if reasons else str(error).partition("\n")[0])


def _stamp(name: str) -> tuple[int, ...]:
    """When a file of this machine was last changed, and its size: with another content it is another job."""
    path = Path(unquote(name.removeprefix("file://")))
    with suppress(OSError):
        found = path.stat()
        return found.st_size, found.st_mtime_ns
    return ()


def _job_id(job: SendJob, df: DataFrame) -> str:
    """The same for the same files and the same way to read them: so the same command again goes on with its job."""
    files = [(name, *_stamp(name)) for name in sorted(df.inputFiles())]
    source = job.source
    mapping = None if source.mapping is None else Path(source.mapping).read_text(encoding="utf-8")
    batch = job.options.get("batch_name")
    reading = [source.format, sorted(source.options.items()), source.command_type, list(source.id_from), source.sql]
    what = [job.domain, files, reading, mapping, batch]
    return f"send-{uuid5(JOBS, json.dumps(what))}"
