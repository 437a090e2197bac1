"""Finds commands, batches and rows of the audit by what is known of them, in bounded time however many there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from django.db import connections
from django.db.models import QuerySet

from commandbus.messages import BatchStatus, Status, storable
from commandbus.models import Audit, Command, CommandType
from commandbus.models.command import CommandQuerySet

AT_MOST = 1000
"""Found in one search."""
LOOK_THROUGH = 10_000
"""Looked at in one search, where no index knows all that is asked for."""

ID_DIGITS = 32
WHOLE_ID = re.compile(r"[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}", re.IGNORECASE)
PART_OF_AN_ID = re.compile(
    r"[0-9a-f]{4,31}|[0-9a-f]{8}-([0-9a-f]{4}-){0,3}[0-9a-f]{0,4}|[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{0,11}",
    re.IGNORECASE,
)
NO_NODE = UUID(int=0)


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is None or empty does not count."""

    text: str = ""
    """A command id or its beginning, a correlation id, a batch id, a part of a type's name, or an error code."""
    domains: tuple[str, ...] = ()
    command_types: tuple[str, ...] = ()
    status: Status | None = None
    running: bool = False
    """Leased by a worker, whatever the status shows."""
    error_types: tuple[str, ...] = ()
    """"" for commands without one; so with the codes."""
    error_codes: tuple[str, ...] = ()
    least_attempts: int | None = None
    node_ids: tuple[UUID, ...] = ()
    created_from: datetime | None = None
    created_until: datetime | None = None
    updated_from: datetime | None = None
    updated_until: datetime | None = None
    either_id: UUID | None = None
    """The id of a command, or its correlation id."""
    batch_id: UUID | None = None


@dataclass(frozen=True, kw_only=True)
class BatchSearch:
    """What is None or empty does not count."""

    text: str = ""
    """A batch id or its beginning, or the beginning of a name."""
    domain: str | None = None
    status: BatchStatus | None = None
    created_from: datetime | None = None
    created_until: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    rows: list[int] = field(default_factory=list)
    """Of the commands or of the audit, in order."""
    more: bool = False
    """Whether there may be others."""
    beyond: int | None = None
    """Where to go on for these; None if the search has to be narrowed instead."""


def find(
    search: Search,
    using: str,
    *,
    beyond: int | None = None,
    oldest_first: bool = False,
    at_most: int | None = None,
    look_through: int | None = None,
) -> Found:
    """Commands in the order in which they were sent, the newest first unless `oldest_first`."""
    at_most = at_most or AT_MOST
    look_through = look_through or LOOK_THROUGH

    def by_index(wanted: Search, among: Sequence[int] | None = None) -> Found:
        return _by_index(wanted, using, [beyond, oldest_first, at_most, look_through, among])

    text = search.text.strip()
    if not text:
        return by_index(search)
    if WHOLE_ID.fullmatch(text):
        found = [by_index(replace(search, text="", either_id=UUID(text)))]
        if search.batch_id in (None, UUID(text)):
            found.append(by_index(replace(search, text="", batch_id=UUID(text))))
        return _united(found, oldest_first=oldest_first)
    types = {text, *(name for name in command_types(using) if text.lower() in name.lower())}
    if search.batch_id is not None:
        look_through = max(look_through // 2, 1)  # the batch is looked through for the types, and again for the codes
    codes = {text, *(code for code in _error_values("code", using) if text.lower() in code.lower())}
    found = []
    if wanted := _both(types, search.command_types):
        found.append(by_index(replace(search, text="", command_types=wanted)))
    if wanted := _both(codes, search.error_codes):
        found.append(by_index(replace(search, text="", error_codes=wanted)))
    if PART_OF_AN_ID.fullmatch(text):
        begins_so = _begins_with(text, search.domains, using, at_most)
        found.append(replace(by_index(search, begins_so.rows), more=begins_so.more))
    return _united(found, oldest_first=oldest_first)


def commands_of(found: Found, using: str, *, oldest_first: bool = False) -> CommandQuerySet:
    return Command.objects.using(using).filter(id__in=found.rows).order_by("id" if oldest_first else "-id")


def find_audit(
    using: str,
    *,
    text: str = "",
    domain: str | None = None,
    event_type: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    beyond: int | None = None,
    oldest_first: bool = False,
) -> tuple[QuerySet[Audit], Found]:
    """The audit, the newest first. `text`: a command id, a batch id, or the name of an operator."""
    text = text.strip()
    conditions = [domain, event_type, since, until, beyond, oldest_first, AT_MOST, LOOK_THROUGH]
    with connections[using].cursor() as cursor:

        def look(command_id: UUID | None, batch_id: UUID | None, operator: str | None) -> Any:
            cursor.execute(
                "SELECT matching, more, next_beyond, first_at, last_at FROM commandbus.search_audit(%s::uuid, %s::uuid,"
                " %s, %s, %s, %s::timestamptz, %s::timestamptz, %s::bigint, %s, %s, %s)",
                [command_id, batch_id, operator, *conditions],
            )
            return cursor.fetchone()

        if WHOLE_ID.fullmatch(text):
            found = look(UUID(text), None, None)
            found = found if found[0] else look(None, UUID(text), None)
        else:
            found = look(None, None, storable(text) or None)
        rows, more, onward, first_at, last_at = found
    # The bounds on ts let PostgreSQL skip the partitions of other months.
    events = (
        Audit.objects.using(using).filter(audit_id__in=rows, ts__gte=first_at, ts__lte=last_at)
        if rows
        else Audit.objects.using(using).none()
    )
    return events.order_by("audit_id" if oldest_first else "-audit_id"), Found(rows=rows, more=more, beyond=onward)


def find_batches(
    search: BatchSearch, using: str, *, beyond: int | None = None, oldest_first: bool = False
) -> tuple[list[UUID], Found]:
    """The ids of batches, the newest first unless `oldest_first`, and whether there are others."""
    text = search.text.strip()

    def by_index(name: str | None, among: list[UUID] | None = None) -> tuple[list[UUID], Found]:
        status = None if search.status is None else search.status.value
        conditions = [search.domain, status, name, search.created_from, search.created_until]
        with connections[using].cursor() as cursor:
            cursor.execute(
                "SELECT * FROM commandbus.search_batches(%s, %s, %s, %s::timestamptz, %s::timestamptz, %s::bigint, %s,"
                " %s, %s, %s::uuid[])",
                [*conditions, beyond, oldest_first, AT_MOST, LOOK_THROUGH, among],
            )
            matching, more, onward = cursor.fetchone()
        return matching, Found(more=more, beyond=onward)

    if not WHOLE_ID.fullmatch(text) and not PART_OF_AN_ID.fullmatch(text):
        return by_index(storable(text) or None)
    first, last = _between(text)
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT * FROM commandbus.search_batch_ids(%s, %s, %s)", [first, last, AT_MOST])
        begins_so, is_cut = cursor.fetchone()
    by_id, _ = by_index(None, begins_so)
    if first == last:
        return by_id, Found()
    by_name, found = by_index(text)
    return list(dict.fromkeys([*by_name, *by_id])), replace(found, more=found.more or is_cut)


def estimated_total(search: Search, using: str) -> int:
    """What PostgreSQL's statistics say. Reads no command."""
    plan = Command.objects.using(using).filter(**_conditions(search)).order_by().explain(format="json")
    return int(json.loads(plan)[0]["Plan"]["Plan Rows"])


def error_types(using: str) -> list[str]:
    """Those that commands have; at most 200."""
    return _error_values("type", using)[:200]


def command_types(using: str, domains: tuple[str, ...] = ()) -> list[str]:
    """Those that workers handle or were sent."""
    known = CommandType.objects.using(using).order_by("command_type")
    if domains:
        known = known.filter(domain__in=domains)
    return list(dict.fromkeys(known.values_list("command_type", flat=True)))


def _united(found: Sequence[Found], *, oldest_first: bool) -> Found:
    """All of them, as far as all have come."""
    reached = [one.beyond for one in found if one.beyond is not None]
    rows = sorted({row for one in found for row in one.rows}, reverse=not oldest_first)
    if not reached:
        return Found(rows=rows, more=any(one.more for one in found))
    beyond = min(reached) if oldest_first else max(reached)
    return Found(
        rows=[row for row in rows if (row <= beyond if oldest_first else row >= beyond)], more=True, beyond=beyond
    )


def _both(these: Iterable[str], those: Sequence[str]) -> tuple[str, ...]:
    """What is in both; all of the first, if nothing is asked for in the second."""
    return tuple(sorted(one for one in these if not those or one in those))


def _by_index(search: Search, using: str, options: Sequence[Any]) -> Found:
    conditions = [
        list(search.domains) or None,
        list(search.command_types) or None,
        None if search.status is None else search.status.value,
        search.running,
        search.either_id,
        search.batch_id,
        list(search.error_types) or None,
        list(search.error_codes) or None,
        search.least_attempts,
        list(search.node_ids) or None,
        search.created_from,
        search.created_until,
        search.updated_from,
        search.updated_until,
    ]
    with connections[using].cursor() as cursor:
        cursor.execute(
            "SELECT * FROM commandbus.search(%s::text[], %s::text[], %s, %s, %s::uuid, %s::uuid, %s::text[],"
            " %s::text[], %s::int, %s::uuid[], %s::timestamptz, %s::timestamptz, %s::timestamptz, %s::timestamptz,"
            " %s::bigint, %s, %s, %s, %s::bigint[])",
            [*conditions, *options],
        )
        rows, more, onward = cursor.fetchone()
    return Found(rows=rows, more=more, beyond=onward)


def _begins_with(text: str, domains: Sequence[str], using: str, at_most: int) -> Found:
    """By the beginning of an id."""
    first, last = _between(text)
    with connections[using].cursor() as cursor:
        cursor.execute(
            "SELECT * FROM commandbus.search_ids(%s, %s, %s::text[], %s)", [first, last, list(domains) or None, at_most]
        )
        rows, more = cursor.fetchone()
    return Found(rows=rows, more=more)


def _between(text: str) -> tuple[UUID, UUID]:
    """The ids that begin so."""
    digits = text.replace("-", "")
    return UUID(digits.ljust(ID_DIGITS, "0")), UUID(digits.ljust(ID_DIGITS, "f"))


def _conditions(search: Search) -> dict[str, Any]:
    conditions = {
        "domain__in": search.domains,
        "command_type__in": search.command_types,
        "status": search.status,
        "lease_read_ct__isnull": False if search.running else None,
        "last_error_type__in": search.error_types if "" not in search.error_types else (),
        "last_error_code__in": search.error_codes if "" not in search.error_codes else (),
        "attempts__gte": search.least_attempts,
        "node_id__in": search.node_ids,
        "batch_id": search.batch_id,
        "created_at__gte": search.created_from,
        "created_at__lte": search.created_until,
        "updated_at__gte": search.updated_from,
        "updated_at__lte": search.updated_until,
    }
    return {name: value for name, value in conditions.items() if value not in (None, ())}


def _error_values(what: Literal["type", "code"], using: str) -> list[str]:
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT commandbus.error_values(%s)", [what])
        values: list[str] = cursor.fetchone()[0]
    return values
