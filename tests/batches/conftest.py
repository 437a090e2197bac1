from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pytest
from django.db import connections

from commandbus import callbacks
from tests.helpers import wait_until

T = TypeVar("T")


@pytest.fixture
def others() -> Iterator[Callable[[Callable[[], T]], Future[T]]]:
    """Runs something on a connection of its own, beside the test."""

    def closing(action: Callable[[], T]) -> Callable[[], T]:
        def run() -> T:
            try:
                return action()
            finally:
                connections.close_all()

        return run

    with ThreadPoolExecutor(8) as pool:
        yield lambda action: pool.submit(closing(action))


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    callbacks.forget_all()
    wait_until(lambda: callbacks._thread is None)
