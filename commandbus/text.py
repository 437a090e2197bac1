"""Text for people who look at a terminal. No Django: Spark's jobs write it too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WIDTH = 30
"""Of a bar, in characters."""


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


def plain(text: str, *, lines: bool = False) -> str:
    """Text of others, without what a terminal would obey. With `lines`, line ends and tabs stay."""
    keep = "\n\t" if lines else ""
    return "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1] for character in text
    )


def bar(part: float) -> str:
    part = min(part, 1.0)
    full = int(part * WIDTH)
    return f"[{'#' * full}{' ' * (WIDTH - full)}] {int(100 * part):3} %"
