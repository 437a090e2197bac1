from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from typing import TextIO

import pytest
from django.core.management import CommandError, call_command


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(*arguments: str, stdout: TextIO | None = None, stderr: TextIO | None = None) -> Ran:
    """A management command, with what it prints and its exit code."""
    out, err = stdout or io.StringIO(), stderr or io.StringIO()
    code = 0
    try:
        call_command(*arguments, stdout=out, stderr=err)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except CommandError as error:  # as manage.py ends
        code = error.returncode
        err.write(f"CommandError: {error}\n")
    return Ran(code, _text(out), _text(err))


def _text(stream: TextIO) -> str:
    stream.seek(0)
    return stream.read()


def type_in(monkeypatch: pytest.MonkeyPatch, content: bytes, *, terminal: bool = False) -> None:
    """What the next command reads from standard input."""
    stream = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdin", stream)
