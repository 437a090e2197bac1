"""Commands that one executor takes at once because its handler is quick."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from commandbus.worker.work import Work


class Group:
    """Calls of a handler that wait for the one before. When that takes long, they are taken away for other executors.

    For one thread that works it off, and any other that takes the rest away.
    """

    def __init__(self, calls: Sequence[Work]) -> None:
        self._waiting = deque(calls)

    def next(self) -> Work | None:
        """The next call of the handler."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def take_rest(self) -> list[Work]:
        rest = []
        while (work := self.next()) is not None:
            rest.append(work)
        return rest
