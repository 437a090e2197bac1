"""Where the lines come from, and where those in error go."""

from __future__ import annotations

import gzip
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from commandbus.exceptions import InvalidCommandError
from commandbus.shell.lines import Format

STDIN = "-"
SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv"}


@dataclass(frozen=True)
class Source:
    name: str
    stream: BinaryIO
    file: BinaryIO
    """What is on the disk: the stream itself, or what it is unpacked from."""
    size: int | None
    """Of the file in bytes, if that is known."""

    def position(self) -> int:
        return self.file.tell()


def format_of(path: str) -> Format:
    """Guessed from the name. Standard input has none, and is taken for JSON lines."""
    if path == STDIN:
        return "jsonl"
    name = Path(path.removesuffix(".gz"))
    if name.suffix not in SUFFIXES:
        raise InvalidCommandError(
            f"the name of {path} does not end in {', '.join(SUFFIXES)} (or one of these and .gz); "
            f"say what it holds: --format jsonl or --format csv"
        )
    return SUFFIXES[name.suffix]


@contextmanager
def reading(path: str) -> Iterator[Source]:
    if path == STDIN:
        yield Source("stdin", sys.stdin.buffer, sys.stdin.buffer, None)
        return
    with _opened(path, "rb") as file:
        found = os.fstat(file.fileno())
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=file, mode="rb")) if path.endswith(".gz") else file
        yield Source(path, stream, file, found.st_size if stat.S_ISREG(found.st_mode) else None)


class Rejects:
    """Keeps lines as they are, in a file that can be corrected and sent again. It is made new, also if none come."""

    def __init__(self, path: str, header: bytes, source: str) -> None:
        if os.path.exists(path) and os.path.samestat(os.stat(path), _stat(source)):
            raise InvalidCommandError(f"--rejects {path} is the file that is read; name another one")
        self._file = _opened(path, "wb")
        self._stream = (
            cast(BinaryIO, gzip.GzipFile(fileobj=self._file, mode="wb")) if path.endswith(".gz") else self._file
        )
        self._stream.write(header)

    def add(self, raw: bytes) -> None:
        self._stream.write(raw)

    def close(self) -> None:
        self._stream.close()
        self._file.close()


def _stat(source: str) -> os.stat_result:
    """Of standard input too: it may be a file that is given to us by `<`."""
    return os.fstat(sys.stdin.fileno()) if source == STDIN else os.stat(source)


def _opened(path: str, mode: str) -> BinaryIO:
    try:
        return cast(BinaryIO, open(path, mode))
    except OSError as error:
        verb = "read" if mode == "rb" else "written"
        raise InvalidCommandError(f"{path} cannot be {verb}: {error.strerror}") from error
