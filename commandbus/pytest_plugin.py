"""pytest fixtures for applications. Loaded by pytest itself once commandbus is installed.

def test_order_is_paid(db, commandbus_run):
    place_order()
    commandbus_run("payments")
    assert Order.objects.get().paid
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from commandbus.handlers import HandlerRegistry


@pytest.fixture
def commandbus_run() -> Callable[..., int]:
    """Run the pending commands of a domain on the test's own connection: `commandbus_run("payments")`."""
    from commandbus import conf
    from commandbus.testing.run import run_pending
    from commandbus.transitions import PostgresTransitions

    def run(domain: str, **options: Any) -> int:
        using = conf.current().database_of(domain)
        return run_pending(PostgresTransitions(using), domain, using=using, **options)

    return run


@pytest.fixture
def commandbus_advance() -> Callable[..., None]:
    """Let time pass for the messages of a domain: `commandbus_advance("payments", 60)`."""
    from commandbus.testing.time import advance

    return advance


@pytest.fixture
def commandbus_queues(request: pytest.FixtureRequest) -> Iterator[None]:
    """Empty all queues after a test that commits (`transactional_db`): Django's flush does not know them."""
    request.getfixturevalue("transactional_db")
    yield
    from commandbus.testing.time import purge

    purge()


@pytest.fixture
def commandbus_handlers() -> Iterator[HandlerRegistry]:
    """The registry of handlers, restored after the test."""
    from commandbus.handlers import registry

    before = registry.copy()
    yield registry
    registry.replace_with(before)
