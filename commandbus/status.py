"""What every domain has to do and who does it, counted in bounded time however much there is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal
from uuid import UUID

from django.db import DatabaseError, InterfaceError, ProgrammingError, connections
from django.db.models import DurationField, ExpressionWrapper, F, Func, Q
from django.db.models.functions import Now

from commandbus import conf, install
from commandbus.exceptions import UnknownDomainError
from commandbus.models import Domain, Node

AT_MOST = 100_000
"""Counts end here."""

RECENTLY = timedelta(hours=1)
"""How long a node that has stopped is shown."""

FORGOTTEN = timedelta(days=1)
"""After this time, a node that was never heard of again is not shown any more."""

MOST_NODES = 1000


@dataclass(frozen=True, kw_only=True)
class DomainStatus:
    domain: str
    database: str
    paused: bool
    waiting: int | None
    """Ready now. A count is None if its queue does not exist."""
    delayed: int | None
    """The time of a retry or of a delay is not over."""
    running: int | None
    """Leased by a worker."""
    in_troubleshooting: int
    replies: int | None
    """Ready now, in the queue that this domain replies to; domains may share one."""
    oldest_ready_seconds: float | None
    """How long the first of those that are ready has been so."""
    more: frozenset[str] = frozenset()
    """The counts that are higher than they say."""
    held: Mapping[UUID, int] = field(default_factory=dict)
    """Running commands, by node."""


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """A process in one database. One that serves domains in several databases is a node in each."""

    node_id: UUID
    database: str
    name: str
    role: str
    domains: tuple[str, ...]
    host: str
    pid: int
    heartbeat_seconds_ago: float
    state: Literal["alive", "late", "stopping", "stopped"]
    """late: not heard of for several of its heartbeats. stopping: an operator has asked it to."""
    held: int
    """Running commands, of the domains that were asked for."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    domains: list[DomainStatus]
    nodes: list[NodeStatus]
    away: dict[str, str]
    """The databases that gave no answer, and why."""


def overview(domains: Collection[str] | None = None) -> Overview:
    """All databases of the settings, or those of some domains. One that is away does not hide the others.

    Raises UnknownDomainError for a domain that its database does not know.
    """
    seen = Overview(domains=[], nodes=[], away={})
    for using in _databases(domains):
        try:
            here = _domains_in(using, domains)
            nodes = _nodes_in(using, here, everyone=domains is None)
        except (DatabaseError, InterfaceError) as error:
            seen.away[using] = _why(error)
            if not connections[using].in_atomic_block:
                connections[using].close()  # the next look begins anew
        else:
            seen.domains.extend(here)
            seen.nodes.extend(nodes)
    return seen


def domain_statuses(domains: Collection[str] | None = None) -> list[DomainStatus]:
    """Of these domains, or of all. Raises DatabaseError if one of their databases is away; see `overview`."""
    return [status for using in _databases(domains) for status in _domains_in(using, domains)]


def node_statuses() -> list[NodeStatus]:
    """Those that run, were late in the last day, or stopped in the last hour. Raises as domain_statuses does."""
    return [node for using in _databases(None) for node in _nodes_in(using, _domains_in(using, None), everyone=True)]


def _databases(domains: Collection[str] | None) -> list[str]:
    if domains is not None:
        return sorted({conf.current().database_of(domain) for domain in domains})
    return [using for using in install.databases() if connections[using].vendor == "postgresql"]


def domains_of(using: str) -> list[str]:
    """Those that a database has, also for replies and of other deployments."""
    names = Domain.objects.using(using).values_list("name", flat=True)
    return sorted(name for name in names if conf.current().database_of(name) == using)


def _domains_in(using: str, domains: Collection[str] | None) -> list[DomainStatus]:
    known = domains_of(using)
    asked = {name for name in domains or () if conf.current().database_of(name) == using}
    if unknown := sorted(asked - set(known)):
        raise UnknownDomainError(f"domain {unknown[0]!r} is not registered; known: {', '.join(known) or 'none'}")
    names = [name for name in known if domains is None or name in domains]
    with connections[using].cursor() as cursor:
        cursor.execute(
            "SELECT d, paused, waiting, delayed, running, in_troubleshooting, replies, oldest_ready_seconds,"
            " more_running, held FROM unnest(%s::text[]) AS d, commandbus.domain_status(d, %s)",
            [names, AT_MOST],
        )
        return [_domain_status(using, *row) for row in cursor.fetchall()]


def _domain_status(
    using: str,
    domain: str,
    paused: bool,
    waiting: int | None,
    delayed: int | None,
    running: int | None,
    in_troubleshooting: int,
    replies: int | None,
    oldest_ready_seconds: float | None,
    more_running: bool | None,
    held: str | None,
) -> DomainStatus:
    counts = {
        "waiting": waiting,
        "delayed": delayed,
        "running": running,
        "in_troubleshooting": in_troubleshooting,
        "replies": replies,
    }
    more = {name for name, count in counts.items() if count is not None and count > AT_MOST}
    capped: dict[str, Any] = {n: None if count is None else min(count, AT_MOST) for n, count in counts.items()}
    return DomainStatus(
        domain=domain,
        database=using,
        paused=paused,
        **capped,
        oldest_ready_seconds=oldest_ready_seconds,
        more=frozenset({*more, "running"} if more_running else more),
        held={UUID(node_id): count for node_id, count in json.loads(held or "{}").items()},
    )


def _nodes_in(using: str, statuses: Sequence[DomainStatus], *, everyone: bool) -> list[NodeStatus]:
    """`everyone`: or only those that serve one of these domains."""
    held: Counter[UUID] = Counter()
    for status in statuses:
        held.update(status.held)
    nodes = (
        Node.objects.using(using)
        .filter(Q(stopped_at=None, heartbeat_at__gt=Now() - FORGOTTEN) | Q(stopped_at__gt=Now() - RECENTLY))
        .annotate(
            silence=ExpressionWrapper(Now() - F("heartbeat_at"), DurationField()),
            patience=Func(F("heartbeat_seconds"), function="commandbus.patience", output_field=DurationField()),
        )
        .order_by("-heartbeat_at")[:MOST_NODES]
    )
    asked = {status.domain for status in statuses}
    found = [
        NodeStatus(
            node_id=node.node_id,
            database=using,
            name=node.name,
            role=node.role,
            domains=tuple(node.domains),
            host=node.host,
            pid=node.pid,
            heartbeat_seconds_ago=max(node.silence.total_seconds(), 0.0),
            state=_state(node),
            held=held[node.node_id],
        )
        for node in nodes
        if everyone or asked & set(node.domains)
    ]
    return sorted(found, key=lambda node: (node.name, node.state, node.pid))


def _state(node: Any) -> Literal["alive", "late", "stopping", "stopped"]:
    if node.stopped_at:
        return "stopped"
    if node.silence > node.patience:
        return "late"
    return "stopping" if node.stop_requested_at else "alive"


def _why(error: Exception) -> str:
    text = str(error).strip()
    return f"{text}; run: manage.py migrate" if isinstance(error, ProgrammingError) else text
