"""Sends one command, or those of a file, and says what became of them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from django.core.management.base import OutputWrapper
from django.db import Error, transaction

from commandbus import api
from commandbus.exceptions import CommandBusError, InvalidCommandError
from commandbus.messages import NewCommand
from commandbus.shell.bulk import Bulk, Tally, longest_line
from commandbus.shell.lines import Format, Line, lines_of
from commandbus.shell.progress import Progress
from commandbus.shell.recipe import Recipe
from commandbus.shell.source import Rejects, Source, format_of, reading
from commandbus.text import plain, plural, table

INTERRUPTED = 130


def send_one(domain: str, command: NewCommand, *, dry_run: bool) -> None:
    """Raises a CommandBusError if it cannot be sent. In a dry run it is taken back in the end."""
    using = api.database_for_sending(domain)
    with transaction.atomic(using=using):
        api.send_commands(domain, [command])
        transaction.set_rollback(dry_run, using=using)


@dataclass(frozen=True, kw_only=True)
class FileJob:
    recipe: Recipe
    path: str
    format: Format | None = None
    rejects: str | None = None
    dry_run: bool = False
    silent: bool = False


def send_file(job: FileJob, out: OutputWrapper, err: OutputWrapper) -> int:
    """Send the lines of a file and answer the exit code. Raises a CommandBusError if nothing can be read at all."""
    api.database_for_sending(job.recipe.domain)  # an unknown one is named before anything is read
    with reading(job.path) as source:
        return _FileSender(job, source, out, err).send()


class _FileSender:
    def __init__(self, job: FileJob, source: Source, out: OutputWrapper, err: OutputWrapper) -> None:
        self._job = job
        self._source = source
        self._out = out
        self._err = err
        try:
            lines = lines_of(source.stream, job.format or format_of(job.path), longest_line())
        except (OSError, EOFError, zlib.error) as error:  # the header of a CSV file is read here
            raise InvalidCommandError(f"{source.name} cannot be read: {error}") from error
        self._rejects = Rejects(job.rejects, lines.header, job.path) if job.rejects is not None else None
        self._progress = Progress(err, "line", source.size, silent=job.silent)
        self._bulk = Bulk(lines, job.recipe, dry_run=job.dry_run, reject=self._reject, progress=self._show)

    def send(self) -> int:
        stopped_by: BaseException | None = None
        try:
            self._bulk.run()
        except (KeyboardInterrupt, OSError, EOFError, zlib.error, Error, CommandBusError) as error:
            stopped_by = error
        finally:
            if self._rejects is not None:
                self._rejects.close()
        self._progress.end()
        if not self._job.silent:
            self._out.write("\n".join(self._summary()))
        if stopped_by is not None:
            self._err.write(self._stopped(stopped_by))
            return INTERRUPTED if isinstance(stopped_by, KeyboardInterrupt) else 1
        return 1 if self._bulk.tally.in_error else 0

    def _reject(self, line: Line, problem: str) -> None:
        if not line.continues:
            self._progress.clear()
            self._err.write(plain(f"{self._source.name}:{line.number}: {problem}"))
        if self._rejects is not None:
            self._rejects.add(line.raw)

    def _show(self, tally: Tally) -> None:
        self._progress.update(tally.lines, 0 if self._source.size is None else self._source.position())

    def _summary(self) -> list[str]:
        tally = self._bulk.tally
        names = ("would be sent", "would be there already", "would be in error")
        if not self._job.dry_run:
            names = ("sent", "already there", "in error")
        counts = [f"{count:,}" for count in (tally.sent, tally.already_there, tally.in_error)]
        rows = [*zip(names, counts, strict=True), ("seconds", f"{self._progress.seconds:.1f}")]
        return table(rows[0], rows[1:], right=[1])

    def _stopped(self, cause: BaseException) -> str:
        after = f"after {plural(self._bulk.tally.lines, 'line')}"
        why = (
            f"interrupted {after}" if isinstance(cause, KeyboardInterrupt) else f"stopped {after}: {str(cause).strip()}"
        )
        what = "nothing was sent" if self._job.dry_run else "what was sent stays, and the same command again goes on"
        return plain(f"{self._source.name}: {why}; {what}")
