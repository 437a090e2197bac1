"""What happened to a command, step by step, with the time that it waited or ran in between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from commandbus.admin import badges
from commandbus.admin.filters import label_of
from commandbus.admin.pretty import Text, pretty, shortened
from commandbus.messages import LIVE, AuditEvent, BatchStatus, Status
from commandbus.models import Audit, Command

MOMENT = timedelta(milliseconds=1)
BAR = 160
"""The length of the longest bar, in pixels."""

TONES: dict[str, str] = {
    AuditEvent.RECEIVED: "running",
    AuditEvent.COMPLETED: "good",
    AuditEvent.OPERATOR_COMPLETE: "good",
    AuditEvent.FAILED: "bad",
    AuditEvent.RETRY_SCHEDULED: "bad",
    AuditEvent.MOVED_TO_TROUBLESHOOTING_QUEUE: "trouble",
    AuditEvent.CANCELED: "quiet",
    AuditEvent.OPERATOR_CANCEL: "quiet",
    AuditEvent.BATCH_STARTED: "running",
    AuditEvent.BATCH_COMPLETED: "good",
    AuditEvent.BATCH_CANCELED: "quiet",
}
AFTER: dict[str, tuple[str, str]] = {
    AuditEvent.RECEIVED: ("running", "ran"),
    AuditEvent.MOVED_TO_TROUBLESHOOTING_QUEUE: ("trouble", "waited for an operator"),
    # A batch waits and runs at the same time.
    AuditEvent.BATCH_SEALED: ("waiting", "after"),
    AuditEvent.BATCH_STARTED: ("running", "after"),
    AuditEvent.BATCH_CANCELED: ("waiting", "after"),
}
SHOWN_APART = ("error", "attempt", "max_attempts", "node_id", "operator", "reason", "msg_id", "delay")
BATCH_EVENTS = [event for event in AuditEvent if event.startswith("BATCH_")]
SHOWN_OF_A_BATCH = ("total_count", "started_at", "completed_at")


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The time between two steps."""

    what: str
    tone: str
    lasted: timedelta
    is_open: bool = False
    """It has not ended."""
    length: int = 0
    """Of its bar, in pixels."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    type: str
    code: str
    message: Text
    details: Text | None
    traceback: Text | None


@dataclass(frozen=True, kw_only=True)
class Step:
    label: str
    tone: str
    at: datetime
    before: Gap | None
    facts: list[tuple[str, str]]
    failure: Failure | None
    details: Text | None


def steps(events: Sequence[Audit], nodes: Mapping[str, str]) -> list[Step]:
    """`events`: masked, oldest first. `nodes`: their names by id."""
    longest = max((later.ts - earlier.ts for earlier, later in pairwise(events)), default=MOMENT)
    found = []
    earlier: Audit | None = None
    for event in events:
        gap = None if earlier is None else _gap(earlier, event.ts, longest)
        found.append(_step(event, gap, nodes))
        earlier = event
    return found


def open_gap(command: Command, events: Sequence[Audit], now: datetime) -> Gap | None:
    """What a command does that has not ended: wait, run, or wait for an operator."""
    if not events or command.status not in (*LIVE, Status.IN_TROUBLESHOOTING_QUEUE):
        return None
    tone, what = AFTER.get(events[-1].event_type, ("waiting", "waited"))
    now_does = {"ran": "runs", "waited": "waits", "waited for an operator": "waits for an operator"}[what]
    return Gap(what=now_does, tone=tone, lasted=now - events[-1].ts, is_open=True)


def operator_retries(events: Iterable[Audit]) -> int:
    return sum(event.event_type == AuditEvent.OPERATOR_RETRY for event in events)


def _gap(earlier: Audit, until: datetime, longest: timedelta) -> Gap | None:
    lasted = until - earlier.ts
    if lasted < MOMENT:
        return None
    tone, what = AFTER.get(earlier.event_type, ("waiting", "waited"))
    return Gap(what=what, tone=tone, lasted=lasted, length=max(2, round(BAR * (lasted / longest))))


def _step(event: Audit, gap: Gap | None, nodes: Mapping[str, str]) -> Step:
    details = event.details_json if isinstance(event.details_json, dict) else {}
    is_of_batch = event.event_type in BATCH_EVENTS
    apart = (*SHOWN_APART, *SHOWN_OF_A_BATCH) if is_of_batch else SHOWN_APART
    rest = {name: value for name, value in details.items() if name not in apart and value is not None}
    has_failures = details.get("status") == BatchStatus.COMPLETED_WITH_FAILURES
    return Step(
        label=label_of(event.event_type),
        tone="bad" if has_failures else TONES.get(event.event_type, "waiting"),
        at=event.ts,
        before=gap,
        facts=_facts_of_batch(details) if is_of_batch else _facts(details, nodes),
        failure=_failure(details.get("error")),
        details=pretty(rest) if rest else None,
    )


def _facts(details: Mapping[str, Any], nodes: Mapping[str, str]) -> list[tuple[str, str]]:
    facts = {
        "attempt": _attempt(details),
        "node": nodes.get(str(details.get("node_id")), str(details.get("node_id") or "")),
        "operator": str(details.get("operator") or ""),
        "reason": str(details.get("reason") or ""),
        "again after": _delay(details.get("delay")),
    }
    return [(name, value) for name, value in facts.items() if value]


def _facts_of_batch(details: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [*_facts(details, {}), *([("commands", f"{details['total_count']:,}")] if "total_count" in details else [])]


def _attempt(details: Mapping[str, Any]) -> str:
    attempt, most = details.get("attempt"), details.get("max_attempts")
    if attempt is None:
        return ""
    return f"{attempt} of {most}" if most is not None else str(attempt)


def _delay(seconds: Any) -> str:
    return badges.span(timedelta(seconds=seconds)) if isinstance(seconds, int | float) and seconds > 0 else ""


def _failure(error: Any) -> Failure | None:
    if not isinstance(error, dict):
        return None
    return Failure(
        type=str(error.get("type") or ""),
        code=str(error.get("code") or ""),
        message=shortened(str(error.get("message") or "")),
        details=pretty(error["details"]) if error.get("details") is not None else None,
        traceback=shortened(str(error["traceback"])) if error.get("traceback") else None,
    )
