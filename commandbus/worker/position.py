from __future__ import annotations

SLOW_SECONDS = 0.05
FULL_SECONDS = 1.0


class Position:
    """Where to read a queue from.

    Usually from its beginning, which finds everything that is ready. While somebody holds a snapshot for long,
    PostgreSQL cannot forget the messages that were taken since, and each such read passes them all. When one has become
    slow, the next ones start where the last one ended, and at least once a second one starts at the beginning.
    """

    def __init__(self) -> None:
        self._floor: int | None = None
        self._highest: int | None = None
        self._full_at = 0.0

    def floor(self, now: float) -> int | None:
        """The lowest message id to look at, None for all."""
        return None if now - self._full_at >= FULL_SECONDS else self._floor

    def was_read(self, floor: int | None, started_at: float, ended_at: float, highest: int | None) -> None:
        if highest is not None:
            self._highest = max(highest, self._highest or 0)
        if floor is None:
            self._full_at = ended_at
            slow = ended_at - started_at > SLOW_SECONDS
            self._floor = self._highest + 1 if slow and self._highest is not None else None
        elif highest is not None:
            self._floor = highest + 1
