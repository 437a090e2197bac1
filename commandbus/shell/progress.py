"""How far a long command is: a bar that is redrawn on a terminal, one line at the end elsewhere."""

from __future__ import annotations

import os
import shutil
import time

from django.core.management.base import OutputWrapper

from commandbus.text import bar, plural

REDRAW_SECONDS = 0.1


class LiveLine:
    """A line that is drawn again and again where there is a terminal."""

    def __init__(self, out: OutputWrapper, *, silent: bool = False) -> None:
        self.live = not silent and out.isatty()
        self._out = out
        self._silent = silent
        self._drawn = 0.0

    def is_due(self) -> bool:
        return self.live and time.monotonic() - self._drawn >= REDRAW_SECONDS

    def draw(self, text: str) -> None:
        """Cut where the terminal ends: what goes on in a second line could not be drawn over."""
        self._write(f"\r\033[K{text[: self._columns() - 1]}")
        self._out.flush()
        self._drawn = time.monotonic()

    def clear(self) -> None:
        """Make room for a line of text. This one comes back with the next draw."""
        if self._drawn:
            self._write("\r\033[K")
            self._drawn = 0.0

    def leave(self) -> None:
        """Let what was drawn last stand, and go on below."""
        if self._drawn:
            self._write("\n")
            self._drawn = 0.0

    def print(self, text: str) -> None:
        """As a line of its own, where nothing is drawn."""
        if not self._silent:
            self._write(f"{text}\n")
            self._out.flush()

    def _columns(self) -> int:
        """Of this terminal. The usual way asks that of standard output, which may be a file at the same time."""
        try:
            columns = os.get_terminal_size(self._out.fileno()).columns
        except (OSError, ValueError):  # it is none, but behaves like one
            columns = 0
        return columns or shutil.get_terminal_size().columns

    def _write(self, text: str) -> None:
        self._out.write(text, style_func=str, ending="")


class Progress:
    """Counts things called `noun`. `total` is what `position` runs up to, if that is known."""

    def __init__(self, out: OutputWrapper, noun: str, total: int | None, *, silent: bool = False) -> None:
        self.total = total
        self._line = LiveLine(out, silent=silent)
        self._noun = noun
        self._started = time.monotonic()
        self._count = 0
        self._position = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def update(self, count: int, position: int) -> None:
        self._count, self._position = count, position
        if self._line.is_due():
            self._draw()

    def clear(self) -> None:
        self._line.clear()

    def end(self) -> None:
        if self._line.live:
            self._draw()
            self._line.leave()
        else:
            self._line.print(self._counted())

    def _draw(self) -> None:
        part = self._position / self.total if self.total else None
        self._line.draw(self._counted() if part is None else f"{bar(part)}  {self._counted()}")

    def _counted(self) -> str:
        rate = self._count / max(self.seconds, 0.001)
        return f"{plural(self._count, self._noun)}, {rate:,.0f}/s"
