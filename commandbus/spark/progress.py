"""How far a job is, told by its row in PostgreSQL: a bar on a terminal, a line at the end elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self, TextIO

from commandbus.exceptions import CommandBusError
from commandbus.spark.connection import Parameters, Session
from commandbus.spark.jobs import Job, find_job
from commandbus.text import bar, plural

LOOK_SECONDS = 0.5

Show = Callable[[Job], None]


class Watch:
    """Looks at a job in a thread of its own while something else runs, and shows what it sees."""

    def __init__(self, parameters: Parameters, job_id: str, show: Show, *, after_run: int = 0) -> None:
        """`after_run`: the number of an earlier run, of which nothing is shown."""
        self._parameters = parameters
        self._job_id = job_id
        self._show = show
        self._after_run = after_run
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commandbus-spark-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with Session(self._parameters, patience=0, name="watch") as session:
            while not self._ended.wait(LOOK_SECONDS):
                self.look(session)

    def look(self, session: Session) -> None:
        """A database that is away is looked at again; it is not for us to complain."""
        with suppress(CommandBusError):
            job = find_job(session, self._job_id)
            if job is not None and job.status == "RUNNING" and job.run > self._after_run:
                self._show(job)


class Bar:
    """`total`: the rows there are, if that is known."""

    def __init__(self, out: TextIO, total: int | None) -> None:
        self._out = out
        self._total = total
        self._is_live = out.isatty()
        self._started_at = time.monotonic()

    def show(self, job: Job) -> None:
        if self._is_live:
            self._out.write(f"\r\033[K{self._line(job)}")
            self._out.flush()

    def end(self, job: Job) -> None:
        self._out.write(f"\r\033[K{self._line(job)}\n" if self._is_live else f"{self._line(job)}\n")
        self._out.flush()

    def leave(self) -> None:
        if self._is_live:
            self._out.write("\n")

    def _line(self, job: Job) -> str:
        new = job.sent - job.sent_before
        rate = new / max(time.monotonic() - self._started_at, 0.001)
        counted = f"{plural(job.sent, 'command')} sent, {rate:,.0f}/s"
        rows = job.rows or job.handled_rows
        return counted if not self._total else f"{bar(rows / self._total)}  {counted}"
