"""What was counted comes and goes, so that PostgreSQL often counts on nothing being there. See tests/test_plans.py."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest
from django.db import connection

from commandbus.models import Batch, BatchDelta, Command
from tests.batches.helpers import fold_batches, make
from tests.helpers import rows_read, send_many

pytestmark = pytest.mark.django_db

TABLES = ("command_bus_batch", "command_bus_batch_delta", "command_bus_command")
BATCHES = 300


@pytest.fixture(params=["unknown", "empty"])
def batch_ids(request: pytest.FixtureRequest) -> Iterator[list[UUID]]:
    if request.param == "empty":
        _make()
        for model in (BatchDelta, Command, Batch):
            model.objects.all().delete()
        _analyze()
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_class WHERE relname = ANY (%s) AND reltuples = 0 AND relpages > 0", [[*TABLES]]
            )
            assert cursor.fetchone() == (len(TABLES),)
    yield _make()
    _analyze()  # it outlives the transaction, and other tests count on what there is


def _make() -> list[UUID]:
    send_many("orders", "PlaceOrder", 3000)
    return [make() for _ in range(BATCHES)]


def _analyze() -> None:
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE command_bus_batch, command_bus_batch_delta, command_bus_command")


def test_a_fold_reads_what_it_takes(batch_ids: list[UUID]) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO command_bus_batch_delta (batch_id, completed_count, at)"
            " SELECT unnest(%s::uuid[]), 1, now() FROM generate_series(1, 10)",
            [batch_ids[: BATCHES // 3]],
        )
    before = {table: rows_read(table) for table in TABLES}
    fold_batches()
    read = {table: rows_read(table) - before[table] for table in TABLES}
    assert not BatchDelta.objects.exists()
    assert read["command_bus_batch_delta"] < 5 * 1000
    assert read["command_bus_batch"] < 10 * BATCHES
    assert read["command_bus_command"] == 0


def test_a_prune_looks_only_for_commands_of_the_batches(batch_ids: list[UUID]) -> None:
    Batch.objects.update(sealed_at="2020-01-01T00:00Z", completed_at="2020-01-01T00:00Z", status="COMPLETED")
    before = rows_read("command_bus_command")
    with connection.cursor() as cursor:
        cursor.execute("SELECT commandbus.prune_batches('orders', now(), 100)")
        assert cursor.fetchone() == (0,)  # their commands are still there
    assert rows_read("command_bus_command") - before <= BATCHES
