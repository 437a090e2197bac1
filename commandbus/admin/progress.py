"""How far a batch has come: its bar, its numbers, its pace."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from commandbus.messages import BatchMetadata, Status

LENGTH = 1000
"""Of a whole bar. It is drawn as wide as there is room."""
LEAST = 6
"""Of a part: 3 that failed are to be seen beside 200,000."""
QUIET = timedelta(minutes=1)
"""Without any count for so long, somebody should look whether workers run."""


@dataclass(frozen=True)
class Part:
    label: str
    count: int
    tone: str
    statuses: tuple[Status, ...]
    """Of the commands that are meant."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    lasted: timedelta | None
    """Since the first command was received, until the end or until now."""
    rate: float | None
    """Commands that ended, a second."""
    ends_at: datetime | None
    """If it goes on like this. Nobody knows how long commands wait for an operator: these do not count."""
    silence: timedelta | None
    """Since something was counted, if that is long ago for a batch that is not complete."""


def parts(batch: BatchMetadata) -> list[Part]:
    return [
        Part("completed", batch.completed_count, "good", (Status.COMPLETED,)),
        Part("failed", batch.failed_count, "bad", (Status.FAILED,)),
        Part("canceled", batch.canceled_count, "quiet", (Status.CANCELED,)),
        Part("in troubleshooting", batch.in_troubleshooting_count, "trouble", (Status.IN_TROUBLESHOOTING_QUEUE,)),
        Part("waiting or running", batch.waiting_count, "left", (Status.PENDING, Status.IN_PROGRESS)),
    ]


def bar(batch: BatchMetadata) -> SafeString:
    """In colours, and in words for who cannot see them."""
    shown = [part for part in parts(batch) if part.count > 0]
    least = LEAST * len(shown)
    total = sum(part.count for part in shown)
    drawn, x = [], 0.0
    for part in shown:
        width = LEAST + (LENGTH - least) * part.count / total
        drawn.append((part.tone, f"{x:.1f}", f"{width:.1f}"))
        x += width
    counts = ", ".join(f"{part.count:,} {part.label}" for part in shown)
    return format_html(
        '<svg class="cb-progress" viewBox="0 0 {} 10" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>',
        LENGTH,
        f"{counts}, of {batch.total_count:,}" if shown else "no commands yet",
        format_html_join("", '<rect class="cb-{}" x="{}" width="{}" height="10"></rect>', drawn),
    )


def legend(batch: BatchMetadata) -> SafeString:
    shown = [part for part in parts(batch) if part.count]
    if not shown:
        return format_html('<span class="quiet">{}</span>', "No commands yet")
    texts = [(part.tone, f"{part.count:,} {part.label}", "" if part is shown[-1] else ",") for part in shown]
    counts = format_html_join(" ", '<span class="cb-count cb-{}">{}{}</span>', texts)
    return format_html('{} <span class="quiet cb-nowrap">of {}</span>', counts, f"{batch.total_count:,}")


def pace(batch: BatchMetadata, now: datetime) -> Pace:
    lasted = None if batch.started_at is None else (batch.completed_at or now) - batch.started_at
    seconds = 0.0 if lasted is None else lasted.total_seconds()
    rate = batch.ended_count / seconds if batch.ended_count and seconds > 0 else None
    ends_at = silence = None
    if not batch.is_complete:
        if rate and batch.waiting_count > 0:
            ends_at = now + timedelta(seconds=batch.waiting_count / rate)
        if now - batch.updated_at >= QUIET:
            silence = now - batch.updated_at
    return Pace(lasted=lasted, rate=rate, ends_at=ends_at, silence=silence)


def rate_text(rate: float) -> str:
    """1,234 a second, 5.2 a second, 3 a minute."""
    if rate >= 100:
        return f"{rate:,.0f} a second"
    if rate >= 0.1:
        return f"{rate:.1f} a second"
    return f"{rate:.2f} a second" if rate >= 0.01 else f"{rate * 3600:.1f} an hour"
