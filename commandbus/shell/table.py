"""Aligned text for people to read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.utils import timezone

SECOND, MINUTE, HOUR, DAY = 1, 60, 3600, 86400


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """One line per row under a header; the columns numbered in `right` hold numbers."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    numbers = set(right)
    return [
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def number(value: int | None, *, more: bool = False) -> str:
    """1,234; with `more`, 1,234+."""
    return "?" if value is None else f"{value:,}{'+' if more else ''}"


def plural(count: int, noun: str) -> str:
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"


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


def plain(text: str, *, lines: bool = False) -> str:
    """Text of others, without what a terminal would obey. With `lines`, line ends and tabs stay."""
    keep = "\n\t" if lines else ""
    return "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1] for character in text
    )


def shortened(text: str, length: int) -> str:
    """On one line, and cut with a mark where it is longer."""
    line = plain(" ".join(text.split()))
    return line if len(line) <= length else line[: length - 1] + "…"
