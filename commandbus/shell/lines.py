"""Commands in a file: one JSON object a line, or CSV with a header. Nothing here needs the database.

Memory is bounded for files of any length, also for those without line ends.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, Protocol

from commandbus.exceptions import InvalidCommandError

Format = Literal["jsonl", "csv"]
FIELDS = ("command_id", "type", "data", "correlation_id", "reply_to", "delay")


@dataclass(frozen=True, slots=True)
class Line:
    """A command as it stands in the file, or why it cannot be read. A record of CSV may take several lines."""

    number: int
    """Of its first line; the file begins with line 1."""
    raw: bytes
    fields: Mapping[str, Any] | None = None
    problem: str | None = None
    continues: bool = False
    """Whether this is a later piece of a line that is too long, which has been named already."""


class Lines(Protocol):
    header: bytes
    """What a file needs before any of these lines."""

    def __iter__(self) -> Iterator[Line]: ...


def lines_of(stream: BinaryIO, format: Format, longest: int) -> Lines:  # noqa: A002 - as its option is called
    """`longest`: a line with more bytes is a problem, and comes in pieces of this size."""
    return CsvLines(stream, longest) if format == "csv" else JsonLines(stream, longest)


class JsonLines:
    header = b""

    def __init__(self, stream: BinaryIO, longest: int) -> None:
        self._pieces = _pieces(stream, longest)
        self._longest = longest

    def __iter__(self) -> Iterator[Line]:
        for number, piece in self._pieces:
            if len(piece) == self._longest and not piece.endswith(b"\n"):
                yield Line(number, piece, problem=_too_long(self._longest))
                yield from _rest(self._pieces)
            elif not piece.isspace():
                try:
                    yield Line(number, piece, _json_fields(_text(number, piece)))
                except InvalidCommandError as error:
                    yield Line(number, piece, problem=str(error))


class CsvLines:
    """The columns command_id, type, correlation_id, reply_to and delay mean what they mean in JSON; an empty cell says
    nothing. The column data holds JSON. Without it, all other columns are the data, as text."""

    def __init__(self, stream: BinaryIO, longest: int) -> None:
        self._pieces = _pieces(stream, longest)
        self._tape = _Tape(self._pieces, longest)
        self._reader = csv.reader(self._tape, strict=True)
        try:
            self._columns = next(self._reader, [])
            self._tape.check()
        except (csv.Error, InvalidCommandError) as error:
            raise InvalidCommandError(f"the header cannot be read: {error}") from None
        self.header = self._tape.cut()
        _check_header(self._columns)

    def __iter__(self) -> Iterator[Line]:
        limit = csv.field_size_limit(self._tape.longest)  # the tape stops at this length too, and says so better
        try:
            while (line := self._next()) is not None:
                yield line
                if not line.raw.endswith(b"\n"):
                    yield from _rest(self._pieces)
        finally:
            csv.field_size_limit(limit)

    def _next(self) -> Line | None:
        fields, problem = None, None
        try:
            cells = next(self._reader, None)
            while cells == []:  # an empty line
                self._tape.cut()
                cells = next(self._reader, None)
            if cells is None:
                return None
            self._tape.check()
            fields = self._fields(cells)
        except (csv.Error, InvalidCommandError) as error:
            problem = f"not CSV: {error}" if isinstance(error, csv.Error) else str(error)
        return Line(self._tape.number, self._tape.cut(), fields, problem)

    def _fields(self, cells: list[str]) -> dict[str, Any]:
        if len(cells) != len(self._columns):
            raise InvalidCommandError(f"{len(cells)} cells, where the header has {len(self._columns)}")
        row = dict(zip(self._columns, cells, strict=True))
        fields: dict[str, Any] = {name: row.pop(name) or None for name in FIELDS if name in row and name != "data"}
        if fields.get("delay") is not None:
            fields["delay"] = _number(fields["delay"])
        return {**fields, "data": parsed(row["data"], "the column data is ") if "data" in row else row}


class _Tape:
    """Feeds the csv module with text, and keeps the bytes that a record is made of."""

    def __init__(self, pieces: Iterator[tuple[int, bytes]], longest: int) -> None:
        self.longest = longest
        self.number = 1
        self._pieces = pieces
        self._taken: list[bytes] = []
        self._size = 0
        self._problem: InvalidCommandError | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        number, piece = next(self._pieces)
        if not self._taken:
            self.number = number
        self._taken.append(piece)
        self._size += len(piece)
        if self._size >= self.longest:
            raise InvalidCommandError(f"{_too_long(self.longest)}, or has a quote that is not closed")
        try:
            return _text(number, piece)
        except InvalidCommandError as error:
            # Not yet: the csv module would begin anew in the middle of the record, and take its rest for another.
            self._problem = self._problem or error
            return piece.decode(errors="replace")

    def check(self) -> None:
        """Raises what was wrong with the text of the record."""
        if self._problem is not None:
            raise self._problem

    def cut(self) -> bytes:
        """What was read since the last cut."""
        taken = b"".join(self._taken)
        self._taken.clear()
        self._size = 0
        self._problem = None
        return taken


def _pieces(stream: BinaryIO, longest: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers. One that is too long comes in pieces, all with its number."""
    number = 1
    while piece := stream.readline(longest):
        yield number, piece
        if piece.endswith(b"\n"):
            number += 1


def _rest(pieces: Iterator[tuple[int, bytes]]) -> Iterator[Line]:
    for number, piece in pieces:
        yield Line(number, piece, continues=True)
        if piece.endswith(b"\n"):
            return


def _text(number: int, piece: bytes) -> str:
    try:
        return piece.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidCommandError(f"not UTF-8: {error.reason} at byte {error.start + 1}; convert the file") from None


def _json_fields(text: str) -> dict[str, Any]:
    fields = parsed(text.rstrip())
    if not isinstance(fields, dict):
        raise InvalidCommandError(f"a JSON object is needed, not {text.strip():.100}")
    if unknown := sorted(fields.keys() - set(FIELDS)):
        names = ", ".join(repr(name) for name in unknown[:5])
        raise InvalidCommandError(f"unknown: {names:.100}; the keys are {', '.join(FIELDS)}; put the rest into data")
    if "data" not in fields:
        raise InvalidCommandError('there is no data; write "data": {} if it has none')
    return fields


def parsed(text: str, what: str = "") -> Any:
    """The value of JSON text. `what` begins the message of the InvalidCommandError: "--data is "."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidCommandError(f"{what}not JSON: {error.msg} at character {error.pos + 1}") from None
    except ValueError as error:
        raise InvalidCommandError(f"{what}not JSON that can be read: {error}") from None
    except RecursionError:
        raise InvalidCommandError(f"{what}nested too deeply") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidCommandError(f"delay must be a number of seconds, not {text!r:.100}") from None


def _too_long(longest: int) -> str:
    return f"longer than {longest:,} bytes"


def _check_header(columns: list[str]) -> None:
    if not columns:
        raise InvalidCommandError("there is no header: the first line of CSV names the columns")
    if "" in columns:
        raise InvalidCommandError(f"column {columns.index('') + 1} of the header has no name")
    if len(set(columns)) < len(columns):
        twice = next(name for name in columns if columns.count(name) > 1)
        raise InvalidCommandError(f"the header has the column {twice!r} twice")
    if "data" in columns and (unknown := [name for name in columns if name not in FIELDS]):
        raise InvalidCommandError(
            f"beside the column data, the header has {unknown[0]!r:.100}; the others are "
            f"{', '.join(name for name in FIELDS if name != 'data')}; put the rest into data, or leave data out"
        )
