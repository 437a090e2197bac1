"""What was counted comes and goes, so that PostgreSQL often counts on nothing being there. See tests/test_plans.py."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest
from django.db import connection
from django.db.models import F

from commandbus.models import Batch, BatchDelta, Command
from commandbus.search import BatchSearch, find_batches
from tests.batches.helpers import fold_batches, make
from tests.helpers import send_many
from tests.plans import BELIEFS, believing, reading

pytestmark = pytest.mark.django_db

TABLES = ("command_bus_batch", "command_bus_batch_delta", "command_bus_command")
BATCHES = 300


@pytest.fixture(params=BELIEFS)
def batch_ids(request: pytest.FixtureRequest) -> Iterator[list[UUID]]:
    with believing(request.param, _make, TABLES):
        yield _make()


def _make() -> list[UUID]:
    send_many("orders", "PlaceOrder", 3000)
    return [make() for _ in range(BATCHES)]


def _count(batch_ids: list[UUID]) -> None:
    """Ten times each, not folded yet."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO command_bus_batch_delta (batch_id, completed_count, at)"
            " SELECT unnest(%s::uuid[]), 1, now() FROM generate_series(1, 10)",
            [batch_ids],
        )


def test_a_fold_reads_what_it_takes(batch_ids: list[UUID]) -> None:
    _count(batch_ids[: BATCHES // 3])
    with reading(TABLES) as read:
        fold_batches()
    assert not BatchDelta.objects.exists()
    assert read["command_bus_batch_delta"] < 5 * 1000
    assert read["command_bus_batch"] < 10 * BATCHES
    assert read["command_bus_command"] == 0


def test_a_fold_does_not_read_what_it_leaves(batch_ids: list[UUID]) -> None:
    fold_batches()  # that they were made
    _count(batch_ids[: BATCHES // 3])
    Batch.objects.update(completed_count=F("total_count"))  # so that it asks each whether there is something left
    with reading(TABLES) as read, connection.cursor() as cursor:
        cursor.execute("SELECT completed FROM commandbus.fold_batches(NULL, 200, 500)")
        assert cursor.fetchone() == ("[]",)
    assert BatchDelta.objects.count() == 500
    assert read["command_bus_batch_delta"] < 5 * 500


def test_whose_counts_are_left_is_told_by_the_counts(batch_ids: list[UUID]) -> None:
    fold_batches()
    counted = batch_ids[: BATCHES // 3]
    _count(counted)
    with reading(TABLES) as read:
        assert BatchDelta.objects.batches_in(["orders"]) == set(counted)
    assert read["command_bus_batch_delta"] < 2 * 10 * len(counted)
    assert read["command_bus_batch"] <= BATCHES


def test_a_search_for_batches_of_known_ids_reads_these(batch_ids: list[UUID]) -> None:
    with reading(TABLES) as read:
        found, _ = find_batches(BatchSearch(text=str(batch_ids[0])), "default")
    assert found == [batch_ids[0]]
    assert read["command_bus_batch"] < BATCHES / 3


def test_a_prune_looks_only_for_commands_of_the_batches(batch_ids: list[UUID]) -> None:
    Batch.objects.update(sealed_at="2020-01-01T00:00Z", completed_at="2020-01-01T00:00Z", status="COMPLETED")
    with reading(TABLES) as read, connection.cursor() as cursor:
        cursor.execute("SELECT commandbus.prune_batches('orders', now(), 100)")
        assert cursor.fetchone() == (0,)  # their commands are still there
    assert read["command_bus_command"] <= BATCHES


def test_a_prune_of_commands_looks_only_for_their_batches(batch_ids: list[UUID]) -> None:
    Command.objects.filter(batch_id__in=batch_ids).update(status="COMPLETED")
    Batch.objects.update(sealed_at="2020-01-01T00:00Z", completed_at="2020-01-01T00:00Z", status="COMPLETED")
    with reading(TABLES) as read, connection.cursor() as cursor:
        cursor.execute("SELECT commandbus.prune_commands('orders', now() + interval '1 day', 1000)")
        assert cursor.fetchone() == (BATCHES,)
    assert read["command_bus_batch"] <= 2 * BATCHES
