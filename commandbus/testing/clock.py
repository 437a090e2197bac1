from __future__ import annotations

from datetime import UTC, datetime, timedelta


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
