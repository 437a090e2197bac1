"""What a person types, and errors as a person reads them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError
from django.db import Error

from commandbus.exceptions import CommandBusError, InvalidCommandError
from commandbus.shell.lines import parsed
from commandbus.shell.table import plain


@contextmanager
def plain_errors() -> Iterator[None]:
    """Errors that a person can do something about end the command with their message, and not with a traceback."""
    try:
        yield
    except CommandBusError as error:
        raise CommandError(plain(str(error))) from error
    except Error as error:
        raise CommandError(f"the database has refused or cannot be reached: {plain(str(error).strip())}") from error


def json_object(text: str, option: str) -> Mapping[str, Any]:
    """The object that is written as `text`, in a file (`@name`), or on standard input (`-`)."""
    value = parsed(_given(text, option), f"{option} is ")
    if not isinstance(value, dict):
        raise InvalidCommandError(f'{option} must be a JSON object like {{"amount": 5}}, not {str(value)!r:.100}')
    return value


def _given(text: str, option: str) -> str:
    try:
        if text == "-":
            return sys.stdin.read()
        if text.startswith("@"):
            return Path(text[1:]).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidCommandError(f"{option} {text} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidCommandError(f"{option} {text} is not UTF-8: {error}") from error
    return text
