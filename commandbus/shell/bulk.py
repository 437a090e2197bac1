"""Sends the commands of a file in chunks, each in a transaction of its own. A line in error stops no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID

from django.db import transaction

from commandbus import api, conf
from commandbus.exceptions import CommandBusError
from commandbus.messages import NewCommand
from commandbus.shell.interrupt import held_back
from commandbus.shell.lines import Line, Lines
from commandbus.shell.recipe import Recipe
from commandbus.shell.seen import Seen
from commandbus.transitions import too_large

CHUNK_LINES = 1000
CHUNK_BYTES = 8 * 1024 * 1024


def longest_line() -> int:
    """The bytes of a line that can still hold data of the allowed size, if every character of these is escaped."""
    return 6 * conf.current().max_payload_bytes + 64 * 1024


@dataclass
class Tally:
    lines: int = 0
    sent: int = 0
    already_there: int = 0
    in_error: int = 0


@dataclass
class Chunk:
    commands: dict[UUID, tuple[Line, NewCommand]] = field(default_factory=dict)
    problems: list[tuple[Line, str]] = field(default_factory=list)
    lines: int = 0
    bytes: int = 0


class Bulk:
    """`reject` is told of each line in error and the reason, in the order of the file; `progress` after each chunk."""

    def __init__(
        self,
        lines: Lines,
        recipe: Recipe,
        *,
        dry_run: bool,
        reject: Callable[[Line, str], None],
        progress: Callable[[Tally], None],
    ) -> None:
        self.tally = Tally()
        self._lines = lines
        self._recipe = recipe
        self._using = api.database_of(recipe.domain)
        self._seen = Seen() if dry_run else None
        self._reject = reject
        self._progress = progress
        self._chunk = Chunk()

    def run(self) -> None:
        try:
            for line in self._lines:
                self._take(line)
                if self._chunk.lines >= CHUNK_LINES or self._chunk.bytes >= CHUNK_BYTES:
                    self._flush()
            self._flush()
        finally:
            if self._seen is not None:
                self._seen.close()

    def _take(self, line: Line) -> None:
        problem = line.problem or ""
        if line.fields is not None:
            try:
                command = self._recipe.command(line.fields)
            except CommandBusError as error:
                problem = str(error)
            else:
                if command.command_id in self._chunk.commands:
                    self._flush()  # so that the first of them stays, and PostgreSQL judges the second
                self._chunk.commands[command.command_id] = line, command
        if problem or line.continues:
            self._chunk.problems.append((line, problem))
        self._chunk.lines += not line.continues
        self._chunk.bytes += len(line.raw)

    def _flush(self) -> None:
        with held_back():
            chunk, self._chunk = self._chunk, Chunk()
            self._finish(chunk)

    def _finish(self, chunk: Chunk) -> None:
        with transaction.atomic(using=self._using):
            known = self._known_from_before(chunk)
            outcomes = [*self._send(chunk).values()]
            if self._seen is not None:
                self._seen.add(command for _, command in chunk.commands.values())
                transaction.set_rollback(True, using=self._using)
        self.tally.lines += chunk.lines
        self.tally.sent += outcomes.count("SENT")
        self.tally.already_there += outcomes.count("DUPLICATE") + known
        self.tally.in_error += sum(not line.continues for line, _ in chunk.problems)
        for line, problem in sorted(chunk.problems, key=lambda found: found[0].number):
            self._reject(line, problem)
        self._progress(self.tally)

    def _send(self, chunk: Chunk) -> dict[UUID, str]:
        """Send what can be sent. The rest moves to the chunk's problems."""
        while chunk.commands:
            outcomes = api.try_send(self._recipe.domain, [command for _, command in chunk.commands.values()])
            refused = {i: outcome for i, outcome in outcomes.items() if outcome in ("CONFLICT", "TOO_LARGE")}
            if not refused:
                return outcomes
            for command_id, outcome in refused.items():
                line, _ = chunk.commands.pop(command_id)
                chunk.problems.append((line, _why(command_id, outcome)))
        return {}

    def _known_from_before(self, chunk: Chunk) -> int:
        """Take out what an earlier chunk of a dry run has met: the database does not know it. Answers how many."""
        if self._seen is None:
            return 0
        compared = {i: self._seen.compare(command) for i, (_, command) in chunk.commands.items()}
        for command_id, same in compared.items():
            if same is None:
                continue
            line, _ = chunk.commands.pop(command_id)
            if not same:
                chunk.problems.append((line, _why(command_id, "CONFLICT")))
        return sum(same is True for same in compared.values())


def _why(command_id: UUID, outcome: str) -> str:
    if outcome == "TOO_LARGE":
        return str(too_large(command_id, "what PostgreSQL allows for its domain"))
    return (
        f"{command_id} was sent before, or stands above in this file, with another type or other data; "
        f"send a changed command under a new id"
    )
