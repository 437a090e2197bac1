"""How single values look on the pages. Everything is escaped here."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.safestring import SafeString

from commandbus.admin.filters import label_of

TONES = {
    "PENDING": "waiting",
    "IN_PROGRESS": "running",
    "COMPLETED": "good",
    "FAILED": "bad",
    "CANCELED": "quiet",
    "IN_TROUBLESHOOTING_QUEUE": "trouble",
    "COMPLETED_WITH_FAILURES": "bad",
    "open": "running",
    "canceled": "quiet",
    "callback not sent": "trouble",
    "alive": "good",
    "late": "bad",
    "stopped": "quiet",
    "stopping": "waiting",
    "paused": "trouble",
    "receiving": "good",
}
LONGEST = 80


def status(name: str) -> SafeString:
    label = "In troubleshooting" if name == "IN_TROUBLESHOOTING_QUEUE" else label_of(name)
    return format_html('<span class="cb-badge cb-{}">{}</span>', TONES[name], label)


def code(value: object) -> SafeString:
    return format_html('<code class="cb-code">{}</code>', value)


def text(value: str) -> SafeString:
    """What somebody else wrote: of any length, in any direction."""
    if len(value) <= LONGEST:
        return format_html("<bdi>{}</bdi>", value)
    return format_html('<bdi title="{}">{}…</bdi>', value[:1000], value[:LONGEST])


def moment(value: datetime) -> SafeString:
    local = timezone.localtime(value) if timezone.is_aware(value) else value
    return format_html(
        '<time datetime="{}" title="{}"><span>{}</span> <span>{}</span></time>',
        value.isoformat(),
        f"{date_format(local, 'DATETIME_FORMAT')} ({span(timezone.now() - value)} ago)",
        f"{local:%Y-%m-%d}",
        f"{local:%H:%M:%S}",
    )


def span(duration: timedelta) -> str:
    """12 ms, 3.4 s, 5 min 12 s, 3 h 7 min, 12 d 4 h."""
    seconds = max(duration.total_seconds(), 0.0)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 60:
        return f"{minutes} min {int(seconds % 60)} s"
    if hours < 24:
        return f"{hours} h {minutes % 60} min"
    return f"{days} d {hours % 24} h"
