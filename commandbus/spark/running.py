"""`send` from files, for people: reads, checks, shows how far it is, and ends with a table."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TextIO
from urllib.parse import quote, unquote
from uuid import uuid5

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from commandbus.exceptions import CommandBusError, ConfigurationError
from commandbus.spark.connection import Session, resolved
from commandbus.spark.interrupt import interruptible
from commandbus.spark.jobs import Job, verify_job
from commandbus.spark.mapping import Input, commands_of
from commandbus.spark.options import JOBS, WriteOptions
from commandbus.spark.progress import Bar
from commandbus.spark.reasons import reason
from commandbus.spark.rows import check_columns
from commandbus.spark.sending import count, send, text_of
from commandbus.spark.spark_session import session
from commandbus.text import plain, plural, table

INTERRUPTED = 130
LONGEST_NAME = 150
"""Bytes in the name of a folder; file systems allow about 255."""


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
    return _Run(job, out, err).run()


class _Run:
    def __init__(self, job: SendJob, out: TextIO, err: TextIO) -> None:
        self._job = job
        self._out = out
        self._err = err
        self._bar = Bar(err, None)
        self._job_id = str(job.options.get("job_id") or "")
        self._started_at = time.monotonic()
        self._is_stopped = False
        self._spark: SparkSession | None = None

    def run(self) -> int:
        self._check()
        try:
            done = interruptible(self._send, self._stop)
            self._bar.end(done)
            self._out.write("\n".join(self._summary(done)) + "\n")
            interruptible(lambda: self._keep_rejects(done), self._stop)
        except KeyboardInterrupt:
            self._bar.leave()
            kept = f"what was sent stays, and the same command again goes on (job {self._job_id})"
            self._say(f"interrupted; {kept if self._job_id else 'nothing was sent'}")
            return INTERRUPTED
        except CommandBusError:
            self._bar.leave()
            raise
        except (PySparkException, Py4JError) as error:
            self._bar.leave()
            raise CommandBusError(f"Spark has given up: {reason(error)}") from error
        return 1 if done.rejected else 0

    def _check(self) -> None:
        """What is wrong without a look at the files. Spark takes its time to start, and longer to read them."""
        try:
            options = text_of({**self._job.options, "url": self._job.url, "domain": self._job.domain})
            wanted = WriteOptions.of(options)
        except ConfigurationError as error:
            raise ConfigurationError(_in_the_shell(str(error))) from None
        with Session(resolved(wanted.url), patience=0) as session:
            verify_job(session, wanted)
        if self._job.rejects is not None and "://" not in self._job.rejects:
            folder = Path(self._job.rejects)
            around = next((name for name in self._job.source.files if _reads(name, folder / "rejects-of-a-job")), None)
            if around is not None:
                raise ConfigurationError(f"--rejects {folder} is in {around}, which is read; name another folder")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigurationError(f"--rejects {folder} cannot be made: {error}") from None

    def _send(self) -> Job:
        self._spark = self._session()
        df = commands_of(self._spark, self._job.source, self._job.domain)
        self._go_on()
        self._job_id = self._job_id or _job_id_of(self._job, df)
        self._check_rejects(df)
        self._say(f"job {self._job_id}, {plural(len(df.inputFiles()), 'file')}")
        self._bar = Bar(self._err, self._count(df))
        self._go_on()
        options = {**self._job.options, "job_id": self._job_id}
        return send(df, url=self._job.url, domain=self._job.domain, show=self._bar.show, **options)

    def _session(self) -> SparkSession:
        # Spark writes what it is asked for onto the terminal, too. The errors are ours to tell.
        logging.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)
        logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
        config = {"spark.ui.showConsoleProgress": "false", **self._job.config}
        spark = session(f"commandbus send {self._job.domain}", master=self._job.master, config=config)
        is_local = (spark.sparkContext.master or "").startswith("local")
        # A cluster has more to say: that it has no room for the job, for example.
        spark.sparkContext.setLogLevel(self._job.config.get("spark.log.level", "OFF" if is_local else "WARN"))
        return spark

    def _stop(self) -> None:
        self._is_stopped = True
        if self._spark is not None:
            self._spark.sparkContext.cancelAllJobs()

    def _go_on(self) -> None:
        if self._is_stopped:
            raise KeyboardInterrupt

    def _count(self, df: DataFrame) -> int | None:
        check_columns(df.schema, None)
        if not self._job.check:
            return None
        return count(df, all_right=self._job.options.get("on_invalid") != "reject")

    def _keep_rejects(self, done: Job) -> None:
        """In a folder of the job, which holds afterwards what this run has set aside, and nothing else."""
        if self._job.rejects is None or self._spark is None:
            return
        folder = self._folder_of_rejects()
        if not done.rejected and "://" not in folder and not Path(folder).exists():
            return
        options = {"table": "rejects", "url": self._job.url, "jobId": done.job_id, "run": str(done.run)}
        rejects = self._spark.read.format("commandbus").options(**options).load().drop("job_id")
        rejects.coalesce(1).write.mode("overwrite").json(folder)
        if done.rejected:
            self._say(f"what was set aside is in {folder}")

    def _folder_of_rejects(self) -> str:
        """Called as nobody else calls theirs, for it is made anew in each run."""
        name = quote(self._job_id, safe="")
        if len(name) > LONGEST_NAME:
            name = f"{name[: LONGEST_NAME - 40]}-{uuid5(JOBS, name)}"
        return f"{self._job.rejects}".rstrip("/") + f"/rejects-{name}"

    def _check_rejects(self, df: DataFrame) -> None:
        if self._job.rejects is None:
            return
        folder = self._folder_of_rejects()
        place = os.path.abspath(folder)
        if any(unquote(name.removeprefix("file://")).startswith(f"{place}/") for name in df.inputFiles()):
            raise ConfigurationError(f"{folder} is read, and --rejects would make it anew; name another folder")
        if "://" not in folder and (foreign := [path for path in Path(folder).glob("*") if not _is_of_spark(path)]):
            raise ConfigurationError(f"--rejects would make {folder} anew, and {foreign[0]} is in it; move it away")

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


def _in_the_shell(text: str) -> str:
    """What is said of an option of DataFrames, of that of the shell."""
    other = {"batchName": "--batch"}
    dashed = r"the option (\w+)"
    return re.sub(dashed, lambda found: other.get(found[1], "--" + re.sub("([A-Z])", r"-\1", found[1]).lower()), text)


def _reads(name: str, path: Path) -> bool:
    """Whether a file, folder or glob called so has this path in it."""
    whole = Path(os.path.abspath(path))
    return any(fnmatch(str(place), os.path.abspath(name)) for place in (whole, *whole.parents))


def _is_of_spark(path: Path) -> bool:
    return path.name.startswith(("part-", "_SUCCESS", "_temporary", "."))


def _stamp(name: str) -> tuple[int, ...]:
    """When a file of this machine was last changed, and its size: with another content it is another job."""
    path = Path(unquote(name.removeprefix("file://")))
    with suppress(OSError):
        found = path.stat()
        return found.st_size, found.st_mtime_ns
    return ()


def _job_id_of(job: SendJob, df: DataFrame) -> str:
    """The same for the same files and the same way to read them: so the same command again goes on with its job."""
    files = [(name, *_stamp(name)) for name in sorted(df.inputFiles())]
    source = job.source
    mapping = None if source.mapping is None else Path(source.mapping).read_text(encoding="utf-8")
    reading = [source.format, sorted(source.options.items()), source.command_type, list(source.id_from), source.sql]
    what = [job.domain, files, reading, mapping]
    return f"send-{uuid5(JOBS, json.dumps(what))}"
