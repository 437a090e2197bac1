"""What a person types: actions, JSON, times, names; and errors as a person reads them."""

from __future__ import annotations

import getpass
import os
import sys
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.conf import settings
from django.core.management.base import CommandError, CommandParser
from django.db import Error
from django.utils import timezone

from commandbus.exceptions import CommandBusError, InvalidCommandError
from commandbus.shell.lines import parsed
from commandbus.text import plain

if TYPE_CHECKING:
    from argparse import _ActionsContainer


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


def uuid(text: str, of: str = "command") -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not the id of a {of}, which is a UUID") from None


def batch_uuid(text: str) -> UUID:
    return uuid(text, "batch")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def field_names(text: str | None, option: str) -> tuple[str, ...]:
    names = () if text is None else tuple(text.split(","))
    if "" in names:
        raise CommandError(f"{option} {text!r} has an empty name; use FIELD or FIELD,FIELD")
    return names


class _ActionParser(CommandParser):
    """Lets ids stand behind options: argparse takes `retry payments --yes ID` for a mistake, and xargs writes it so."""

    _intermixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if self._intermixing:  # that calls this
            return super().parse_known_args(args, namespace)
        self._intermixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._intermixing = False


def with_actions(parser: CommandParser) -> Callable[[str, str], CommandParser]:
    """Let a command begin with an action. Answers what adds one, by its name and its description."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_ActionParser)

    def action(name: str, description: str) -> CommandParser:
        added = actions.add_parser(name, help=description, description=description)
        _add_usual(added)
        return added

    return action


def _add_usual(parser: ArgumentParser) -> None:
    """What every command of Django takes, so that it may also stand after the action."""
    parser.add_argument("-v", "--verbosity", type=int, choices=[0, 1, 2, 3], default=SUPPRESS, help=SUPPRESS)
    for name in ("--settings", "--pythonpath"):
        parser.add_argument(name, default=SUPPRESS, help=SUPPRESS)
    for name in ("--traceback", "--no-color", "--force-color", "--skip-checks"):
        parser.add_argument(name, action="store_true", default=SUPPRESS, help=SUPPRESS)


def add_format(parser: _ActionsContainer) -> None:
    """How a file of commands is read."""
    parser.add_argument("--format", choices=["jsonl", "csv"], help="of the file (by its name)")
    parser.add_argument(
        "--id-from",
        metavar="FIELD[,FIELD]",
        help="the fields of the data that identify a command, for lines without command_id",
    )


def add_operator(parser: ArgumentParser) -> None:
    parser.add_argument("--operator", help="who does it, for the audit (who is logged in)")


def add_audit(parser: ArgumentParser, *, reason_required: bool = False) -> None:
    """What an action on commands takes."""
    add_operator(parser)
    parser.add_argument("--reason", required=reason_required, help="why, for the audit")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def operator() -> str:
    """Who is logged in to the system, also behind sudo."""
    for ask in (os.getlogin, getpass.getuser):
        try:
            return ask()
        except (OSError, KeyError):  # no terminal; no such user, as in many containers
            continue
    raise CommandError("the system does not say who you are; add --operator NAME")
