from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from django.db import connections
from hypothesis import settings

from commandbus.embedded import home_for, remove
from commandbus.testing.time import purge
from tests.helpers import wait_until
from tests.settings import TEST_SERVER

# A shell that runs us in the background ignores Ctrl-C, and so would the processes that tests send it to.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("here", deadline=None)  # the machine may be busy; no test asserts a time
settings.load_profile("here")

ENVIRONMENT = {"default": "COMMANDBUS_TEST_DATABASE", "second": "COMMANDBUS_TEST_SECOND_DATABASE"}
NEEDS_POSTGRES = {"db", "transactional_db", "postgres", "commandbus_queues", "live_server"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("django_db") or NEEDS_POSTGRES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def postgres() -> Iterator[None]:
    """The embedded server of the tests. Tests without a database never start it."""
    TEST_SERVER.start()
    yield
    TEST_SERVER.release()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home for a server of the test's own, beside those of checkouts: pytest's folder is closed to other users."""
    place = home_for(tmp_path)
    yield place
    wait_until(lambda: not (place / "data" / "postmaster.pid").exists(), "the end of the server")
    remove(place)


@pytest.fixture(scope="session")
def django_db_modify_db_settings(postgres: None, django_db_modify_db_settings_parallel_suffix: None) -> None:
    """pytest-django calls this before it makes the test database."""


def databases_of(request: pytest.FixtureRequest) -> list[str]:
    """The databases that a test may use: the default one, unless its mark names others."""
    marker = request.node.get_closest_marker("django_db")
    return sorted(marker.kwargs.get("databases") or ["default"]) if marker else ["default"]


def other_sessions(using: str) -> list[str]:
    """What somebody else still does in a test database: a worker's connection that nobody has closed."""
    with connections[using].cursor() as cursor:
        cursor.execute(
            "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND backend_type = 'client backend'"
        )
        return [query for (query,) in cursor.fetchall()]


def is_left_alone(using: str) -> bool:
    return not other_sessions(using)


@pytest.fixture(autouse=True)
def _clean_queues(request: pytest.FixtureRequest) -> Iterator[None]:
    """Django's flush does not know PGMQ's queues, nor the flags of idle workers."""
    committing = "transactional_db" in request.fixturenames or any(
        marker.kwargs.get("transaction") for marker in request.node.iter_markers("django_db")
    )
    if not committing:
        yield
        return
    request.getfixturevalue("transactional_db")
    databases = databases_of(request)
    with pytest.MonkeyPatch.context() as patch:
        for using in databases:  # for processes that a test starts
            patch.setenv(ENVIRONMENT[using], connections[using].settings_dict["NAME"])
        yield
    for using in databases:
        wait_until(partial(is_left_alone, using), f"the end of all other sessions {other_sessions(using)}")
        with connections[using].cursor() as cursor:
            cursor.execute("TRUNCATE command_bus_idle_worker")
    purge()
