"""When a worker that has emptied its queue looks again."""

from __future__ import annotations

import time

SHORTEST = 0.005
LONGEST = 0.05
LONGEST_IN_VAIN = 0.1
"""Others are faster, or the domain is paused: each look costs those who send, and gains nobody anything."""
ENOUGH = 10
"""What a look should find at least while commands come fast."""


class Pace:
    """A command that comes alone is fetched at once. If they come fast, they wait for each other for some milliseconds.

    Each of many looks that find little would cost the senders more than it gains.
    """

    def __init__(self) -> None:
        self._seconds = SHORTEST
        self._last_at = 0.0

    def looked(self, found: int, room: int, *, woken: bool) -> None:
        """`woken`: whether a notification was the reason."""
        if not found and not woken:
            return
        if found < room:
            self._last_at = time.monotonic()
        if found == 0:
            self._seconds = min(2 * self._seconds, LONGEST_IN_VAIN)
        elif found >= ENOUGH:
            self._seconds = min(2 * self._seconds, LONGEST)
        else:
            self._seconds = max(self._seconds / 2, SHORTEST)

    def too_soon(self) -> float:
        """The seconds until the next look, if that is not now."""
        return max(0.0, self._last_at + self._seconds - time.monotonic())
