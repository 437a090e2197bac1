"""Makes a batch of the commands of a file: all of them, or nothing."""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.core.management.base import OutputWrapper
from django.db import transaction

from commandbus import api
from commandbus.batches import create_batch
from commandbus.exceptions import CommandBusError, InvalidCommandError
from commandbus.messages import BatchCommand, NewCommand
from commandbus.shell.bulk import longest_line
from commandbus.shell.interrupt import held_back
from commandbus.shell.lines import Format, Lines, lines_of
from commandbus.shell.progress import Progress
from commandbus.shell.recipe import Recipe
from commandbus.shell.sending import INTERRUPTED
from commandbus.shell.source import Source, format_of, reading
from commandbus.text import plain, plural

UUIDS = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, kw_only=True)
class BatchFile:
    recipe: Recipe
    path: str
    format: Format | None = None
    name: str | None = None
    custom_data: Mapping[str, Any] | None = None
    on_complete: BatchCommand | None = None
    dry_run: bool = False
    silent: bool = False


def create(job: BatchFile, out: OutputWrapper, err: OutputWrapper) -> int:
    """Create the batch, print its id, and answer the exit code. Raises a CommandBusError if it cannot be created."""
    api.database_for_sending(job.recipe.domain)  # an unknown one is named before anything is read
    batch_id: UUID | None = None
    is_interrupted = False
    with reading(job.path) as source:
        progress = Progress(err, "line", source.size, silent=job.silent)
        commands = _Commands(source, job.format or format_of(job.path), job.recipe, progress)
        try:
            with commands.held_back:
                batch_id = _create(job, commands)
        except KeyboardInterrupt:
            is_interrupted = True
        except (OSError, EOFError, zlib.error) as error:
            raise InvalidCommandError(
                f"{source.name}: stopped {commands.after}: {error}; nothing was created"
            ) from error
        finally:
            if batch_id is None:
                progress.clear()
    if batch_id is None:
        # A second Ctrl-C does not wait for the commit.
        known = "commandbus_batch list knows whether it was created" if commands.all_read else "nothing was created"
        err.write(plain(f"{source.name}: interrupted {commands.after}; {known}"))
        return INTERRUPTED
    progress.end()
    _tell(job, batch_id, commands.count, out, err)
    if is_interrupted and not job.dry_run:
        err.write("interrupted, but the batch was created already")
    return INTERRUPTED if is_interrupted else 0


def _create(job: BatchFile, commands: _Commands) -> UUID:
    domain = job.recipe.domain
    using = api.database_of(domain)
    try:
        with transaction.atomic(using=using):
            batch_id = create_batch(
                domain, commands, name=job.name, custom_data=job.custom_data, on_complete=job.on_complete
            )
            transaction.set_rollback(job.dry_run, using=using)
    except CommandBusError as error:
        if (line := commands.line_of(error)) is None:
            raise
        raise commands.wrong(*line) from error
    return batch_id


def _tell(job: BatchFile, batch_id: UUID, count: int, out: OutputWrapper, err: OutputWrapper) -> None:
    if job.dry_run:
        out.write(f"a batch of {plural(count, 'command')} would be created")
        return
    if job.on_complete is not None and not job.silent:
        sent = job.on_complete
        err.write(plain(f"when it completes, {sent.command_type} is sent as {sent.command_id}"), style_func=str)
    out.write(str(batch_id))  # a script takes it, so nothing else goes there


class _Commands:
    """The commands of a file, one after the other. It knows the lines only of those that are just being sent."""

    def __init__(self, source: Source, kind: Format, recipe: Recipe, progress: Progress) -> None:
        self.count = 0
        self.all_read = False
        self.held_back = ExitStack()
        """Holds Ctrl-C back from the moment when all is read: from then on, it must be known whether it committed."""
        self._source = source
        self._format = kind
        self._recipe = recipe
        self._progress = progress
        self._recent: deque[tuple[UUID, int]] = deque(maxlen=api.CHUNK)

    @property
    def after(self) -> str:
        return f"after {plural(self.count, 'line')}"

    def __iter__(self) -> Iterator[NewCommand]:
        for line in self._lines():
            if line.fields is None:
                raise self.wrong(line.number, line.problem or "")
            try:
                command = self._recipe.command(line.fields)
            except CommandBusError as error:
                raise self.wrong(line.number, str(error)) from error
            self._recent.append((command.command_id, line.number))
            self.count += 1
            self._progress.update(self.count, 0 if self._source.size is None else self._source.position())
            yield command
        if not self.count:
            raise InvalidCommandError(
                f"{self._source.name}: there are no commands in it, and a batch needs at least one"
            )
        self.all_read = True
        self.held_back.enter_context(held_back())

    def line_of(self, error: CommandBusError) -> tuple[int, str] | None:
        """The line of the command that an error of the sending is about, and what is wrong with it."""
        if isinstance(error, _LineError):
            return None
        for found in UUIDS.findall(str(error)):
            for number, (command_id, line) in zip(range(self.count, 0, -1), reversed(self._recent), strict=False):
                if str(command_id) == found:  # the last of them, if there are two
                    return line, str(error).removeprefix(f"number {number}: ")
        return None

    def wrong(self, line: int, why: str) -> InvalidCommandError:
        return _LineError(f"{self._source.name}:{line}: {why}; nothing was created")

    def _lines(self) -> Lines:
        try:
            return lines_of(self._source.stream, self._format, longest_line())
        except InvalidCommandError as error:
            raise self.wrong(1, str(error)) from error


class _LineError(InvalidCommandError):
    """Says the line already."""
