"""The no-op job of every peer."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.counter import Counter

counter = Counter()


def payload(number: int) -> dict[str, int | str]:
    return {"n": number, "account": "DE-1", "amount": 10}


def chunks(count: int, size: int) -> Iterator[range]:
    """The numbers from 0 to `count`, some at a time."""
    for start in range(0, count, size):
        yield range(start, min(start + size, count))
