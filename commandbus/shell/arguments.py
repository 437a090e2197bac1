"""What a person types: JSON, times, names; and errors as a person reads them."""

from __future__ import annotations

import getpass
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core.management.base import CommandError
from django.db import Error
from django.utils import timezone

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


def moment(text: str) -> datetime:
    """A time as ISO 8601 writes it, in the time zone of the project if it names none; a day is its beginning."""
    try:
        value = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no time like 2026-01-31 or 2026-01-31T08:00+01:00") from None
    return timezone.make_aware(value) if settings.USE_TZ and timezone.is_naive(value) else value


def uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not the id of a command, which is a UUID") from None


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def operator() -> str:
    """Who is logged in to the system, also behind sudo."""
    for ask in (os.getlogin, getpass.getuser):
        try:
            return ask()
        except (OSError, KeyError):  # no terminal; no such user, as in many containers
            continue
    raise CommandError("the system does not say who you are; add --operator NAME")
