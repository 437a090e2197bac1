"""Which commands an action is about, as the confirmation page hands it on: rows, or a group of those in trouble."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import islice
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import connections
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from commandbus import conf, ops
from commandbus.api import database_of, get_command, uuid_of
from commandbus.exceptions import InvalidCommandError
from commandbus.models import Command

AT_MOST = 10_000
"""In one request."""
SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Target:
    back: str = ""
    """Where the operator came from."""
    rows: Mapping[str, Mapping[UUID, int]] = field(default_factory=dict)
    """By domain: the ids, and the message that each had when it was chosen."""
    domain: str = ""
    which: ops.TroubleshootingFilter | None = None
    """Or a group of this domain."""
    asked: int = 0
    """How many of the group the operator was asked about."""

    @cached_property
    def _found(self) -> Mapping[UUID, int]:
        """What the group has."""
        return {} if self.which is None else ops.select(self.domain, self.which, at_most=AT_MOST + 1).messages

    @cached_property
    def _selections(self) -> dict[str, ops.Selection]:
        if self.which is None:
            return {domain: ops.Selection(messages) for domain, messages in self.rows.items()}
        chosen = dict(islice(self._found.items(), AT_MOST))
        return {self.domain: ops.Selection(chosen)} if chosen else {}

    def selections(self) -> dict[str, ops.Selection]:
        return self._selections

    @property
    def count(self) -> int:
        return sum(len(selection.messages) for selection in self._selections.values())

    @property
    def gone(self) -> int:
        """How many of the group are no longer in it since the operator was asked."""
        return max(0, self.asked - self.count)

    @property
    def is_cut(self) -> bool:
        return self.which is not None and len(self._found) > AT_MOST

    def shown(self) -> list[Command]:
        """Some of them."""
        found: list[Command] = []
        for domain, selection in self._selections.items():
            commands = Command.objects.using(conf.current().database_of(domain))
            ids = list(selection.messages)[: SHOWN - len(found)]
            found += commands.these(domain, ids).order_by("-id")
        return found

    def hidden(self) -> dict[str, str]:
        """What read_target reads."""
        if self.which is None:
            lines = [
                f"{domain}/{command_id}/{msg_id}"
                for domain, ids in self.rows.items()
                for command_id, msg_id in ids.items()
            ]
            return {"rows": "\n".join(lines), "back": self.back}
        until = self.which.until.isoformat() if self.which.until else ""
        group = {"type": self.which.type, "error_type": self.which.error_type, "error_code": self.which.error_code}
        asked = str(self.asked or self.count)
        return {
            "domain": self.domain,
            "until": until,
            "asked": asked,
            "back": self.back,
            **{name: value or "" for name, value in group.items()},
        }


def chosen_rows(commands: QuerySet[Command], back: str) -> Target:
    rows: dict[str, dict[UUID, int]] = defaultdict(dict)
    for domain, command_id, msg_id in commands.values_list("domain", "command_id", "msg_id"):
        rows[domain][command_id] = msg_id or 0
    return Target(rows=rows, back=back)


def read_target(given: Mapping[str, Any]) -> Target:
    """Raises InvalidCommandError or UnknownDomainError for what cannot be meant."""
    if any("\0" in str(value) for value in given.values()):
        raise InvalidCommandError("PostgreSQL knows no text with a NUL; choose the commands again")
    back = str(given.get("back", ""))
    if "domain" in given:
        domain = str(given["domain"])
        which = ops.TroubleshootingFilter(
            type=str(given.get("type", "")),
            error_type=str(given.get("error_type", "")),
            error_code=str(given.get("error_code", "")),
            until=_moment(str(given.get("until", "")), database_of(domain)),
        )
        asked = str(given.get("asked", ""))
        return Target(
            domain=domain, which=which, back=back, asked=int(asked) if asked.isdecimal() and len(asked) < 9 else 0
        )
    if "command" in given:
        domain, _, command_id = str(given["command"]).rpartition("/")
        command = get_command(domain, uuid_of(command_id, "command_id"))
        if command is None:
            raise InvalidCommandError(f"there is no command {command_id} in domain {domain!r}; it may have been pruned")
        return Target(rows={domain: {command.command_id: command.msg_id or 0}}, back=back)
    rows: dict[str, dict[UUID, int]] = defaultdict(dict)
    for line in str(given.get("rows", "")).split():
        domain, command_id, msg_id = [*line.rsplit("/", 2), "", ""][:3]
        if not msg_id.isdecimal() or len(msg_id) > 18:
            raise InvalidCommandError(f"{line!r:.100} does not name a command; choose the commands again")
        rows[domain][uuid_of(command_id, "command_id")] = int(msg_id)
    for domain in rows:
        database_of(domain)  # must know it
    return Target(rows=rows, back=back)


def _moment(text: str, using: str) -> datetime:
    """Until when a command must have failed: what fails after the operator has looked is not what they agreed to."""
    try:
        moment = parse_datetime(text) if text else _now(using)
    except ValueError:
        moment = None
    if moment is None or (text and timezone.is_naive(moment) is settings.USE_TZ):
        raise InvalidCommandError(f"{text!r:.100} is not a time; choose the group again")
    return moment


def _now(using: str) -> datetime:
    """By the clock that says when commands have failed."""
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        moment: datetime = cursor.fetchone()[0]
    return moment
