"""Aligned text for people to read."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.utils import timezone

from commandbus.text import plain

SECOND, MINUTE, HOUR, DAY = 1, 60, 3600, 86400


def age(seconds: float | None) -> str:
    """In the unit that tells enough: 12 s, 5 min, 3 h, 2 d. Clocks may differ, so nothing is younger than now."""
    if seconds is None:
        return ""
    seconds = max(seconds, 0)
    for unit, name, until in ((SECOND, "s", 2 * MINUTE), (MINUTE, "min", 2 * HOUR), (HOUR, "h", 2 * DAY)):
        if seconds < until:
            return f"{int(seconds // unit)} {name}"
    return f"{int(seconds // DAY):,} d"


def moment(value: datetime) -> str:
    """In the time zone of the project."""
    return (timezone.localtime(value) if timezone.is_aware(value) else value).strftime("%Y-%m-%d %H:%M:%S")


def ago(value: datetime) -> str:
    """A time, and how long that is ago."""
    return f"{moment(value)}  ({age((timezone.now() - value).total_seconds())} ago)"


def json_text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, cls=DjangoJSONEncoder)


def shortened(text: str, length: int) -> str:
    """On one line, and cut with a mark where it is longer."""
    line = plain(" ".join(text.split()))
    return line if len(line) <= length else line[: length - 1] + "…"
