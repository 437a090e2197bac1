"""What a worker process runs at this moment, in memory that it shares with its supervisor.

It survives the process, however that ends, and costs three writes per call of a handler.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from multiprocessing import get_context

_RECYCLING, _HAS_FETCHED = 0, 1
_HEAD = 2
_FIELDS = 3


class Board:
    def __init__(self, values: MutableSequence[int]) -> None:
        self.values = values

    @classmethod
    def private(cls, slots: int) -> Board:
        return cls([0] * (_HEAD + _FIELDS * slots))

    @classmethod
    def shared(cls, slots: int) -> Board:
        return cls(get_context("spawn").RawArray("q", _HEAD + _FIELDS * slots))

    def start(self, slot: int, domain: int, low: int, high: int) -> None:
        """`domain`: its number among the worker's. `low` and `high`: the range of msg_id that the call is for."""
        at = _HEAD + _FIELDS * slot
        self.values[at + 1] = low
        self.values[at + 2] = high
        self.values[at] = domain + 1  # last, because it makes the entry valid

    def end(self, slot: int) -> None:
        self.values[_HEAD + _FIELDS * slot] = 0

    def started(self, domain: int) -> list[tuple[int, int]]:
        """The ranges of msg_id that run, or were running when the process died."""
        return [
            (self.values[at + 1], self.values[at + 2])
            for at in range(_HEAD, len(self.values), _FIELDS)
            if self.values[at] == domain + 1
        ]

    def say_recycling(self) -> None:
        """Ask for a replacement; this process takes no more work."""
        self.values[_RECYCLING] = 1

    def is_recycling(self) -> bool:
        return self.values[_RECYCLING] == 1

    def say_fetched(self) -> None:
        self.values[_HAS_FETCHED] = 1

    def has_fetched(self) -> bool:
        """Whether it has had anything to do."""
        return self.values[_HAS_FETCHED] == 1
