"""How far a long command is: a bar that is redrawn on a terminal, one line at the end elsewhere."""

from __future__ import annotations

import time

from django.core.management.base import OutputWrapper

from commandbus.shell.table import plural

WIDTH = 30
REDRAW_SECONDS = 0.1


class Progress:
    """Counts things called `noun`. `total` is what `position` runs up to, if that is known."""

    def __init__(self, out: OutputWrapper, noun: str, total: int | None, *, silent: bool = False) -> None:
        self._out = out
        self._noun = noun
        self._total = total
        self._silent = silent
        self._live = not silent and out.isatty()
        self._started = time.monotonic()
        self._drawn = 0.0
        self._count = 0
        self._position = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def update(self, count: int, position: int) -> None:
        self._count, self._position = count, position
        if self._live and time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self._draw()

    def clear(self) -> None:
        """Make room for a line of text. The bar comes back with the next update."""
        if self._live and self._drawn:
            self._write("\r\033[K")
            self._drawn = 0.0

    def end(self) -> None:
        if self._live:
            self._draw()
            self._write("\n")
        elif not self._silent:
            self._write(f"{self._counted()}\n")

    def _draw(self) -> None:
        self._write(f"\r\033[K{self._bar()}{self._counted()}")
        self._out.flush()
        self._drawn = time.monotonic()

    def _bar(self) -> str:
        if not self._total:
            return ""
        part = min(self._position / self._total, 1.0)
        full = int(part * WIDTH)
        return f"[{'#' * full}{' ' * (WIDTH - full)}] {int(100 * part):3} %  "

    def _counted(self) -> str:
        rate = self._count / max(self.seconds, 0.001)
        return f"{plural(self._count, self._noun)}, {rate:,.0f}/s"

    def _write(self, text: str) -> None:
        self._out.write(text, style_func=str, ending="")
