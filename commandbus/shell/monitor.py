"""The state of the bus as tables, as JSON, once or again and again."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import asdict

from django.core.management.base import OutputWrapper
from django.utils import timezone

from commandbus import conf
from commandbus.shell.table import age
from commandbus.status import DomainStatus, NodeStatus, Overview, overview
from commandbus.text import number, plain, table

CLEAR = "\033[H\033[2J"


def show(
    domains: Collection[str] | None, out: OutputWrapper, *, as_json: bool = False, every: float | None = None
) -> int:
    """Print the state once and answer the exit code: 1 if a database is away. With `every`, until Ctrl-C."""
    if every is None:
        seen = overview(domains)
        out.write(_json(seen, indent=2) if as_json else text(seen))
        return 1 if seen.away else 0
    try:
        while True:
            seen = overview(domains)
            _redraw(out, _json(seen) if as_json else f"{_now()}  every {every:g} s, Ctrl-C ends\n\n{text(seen)}\n")
            time.sleep(every)
    except KeyboardInterrupt:
        return 0


def _redraw(out: OutputWrapper, content: str) -> None:
    out.write(CLEAR + content if out.isatty() else content)
    out.flush()


def _now() -> str:
    return timezone.localtime().strftime("%Y-%m-%d %H:%M:%S")


def text(seen: Overview) -> str:
    """What a database that is away would have shown is not called missing."""
    blocks = [
        [f"database {using!r} is away: {plain(why)}" for using, why in seen.away.items()],
        _domains(seen.domains) if seen.domains or not seen.away else [],
        _nodes(seen.nodes) if seen.nodes or not seen.away else [],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _domains(domains: Collection[DomainStatus]) -> list[str]:
    header = ("DOMAIN", "WAITING", "DELAYED", "RUNNING", "TROUBLESHOOTING", "REPLIES", "OLDEST", "")

    def count(status: DomainStatus, name: str) -> str:
        if name == "replies" and status.domain.endswith(conf.REPLIES):
            return ""  # nobody replies to a reply
        return number(getattr(status, name), more=name in status.more)

    rows = [
        (
            status.domain,
            *(count(status, name) for name in ("waiting", "delayed", "running", "in_troubleshooting", "replies")),
            age(status.oldest_ready_seconds),
            "paused" if status.paused else "",
        )
        for status in domains
    ]
    return table(header, rows, right=range(1, 7)) if rows else ["no domain is registered; run: manage.py migrate"]


def _nodes(nodes: Collection[NodeStatus]) -> list[str]:
    header = ("NODE", "ROLE", "DOMAINS", "HOST", "PID", "HEARTBEAT", "STATE", "HOLDS")
    rows = [
        (
            plain(node.name),
            node.role,
            ", ".join(node.domains),
            plain(node.host),
            str(node.pid),
            age(node.heartbeat_seconds_ago),
            node.state,
            number(node.held),
        )
        for node in nodes
    ]
    return table(header, rows, right=[4, 5, 7]) if rows else ["no worker runs; start one: manage.py commandbus_worker"]


def _json(seen: Overview, indent: int | None = None) -> str:
    """One line without `indent`, so that a stream of them can be read."""
    domains = [
        {**asdict(status), "more": sorted(status.more), "held": {str(node): n for node, n in status.held.items()}}
        for status in seen.domains
    ]
    nodes = [{**asdict(node), "node_id": str(node.node_id)} for node in seen.nodes]
    return json.dumps({"domains": domains, "nodes": nodes, "away": seen.away}, indent=indent, ensure_ascii=False)
