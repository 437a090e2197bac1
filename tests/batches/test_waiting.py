"""Waiting for the end of a batch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, transaction

from commandbus import (
    BatchMetadata,
    BatchStatus,
    BatchTimeoutError,
    InvalidCommandError,
    UncommittedBatchError,
    UnknownBatchError,
    aseal_batch,
    await_for_batch,
    cancel_batch,
    open_batch,
    seal_batch,
    uuid7,
    wait_for_batch,
)
from commandbus.batches import _BatchWait
from commandbus.models import BatchDelta
from tests.batches.helpers import (
    batch,
    finish,
    in_another_session,
    make,
    receive,
)
from tests.helpers import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)


def test_waiting_ends_when_the_batch_has_completed(others: Callable[..., Future[BatchMetadata]]) -> None:
    batch_id = make(2)
    waiting = others(lambda: wait_for_batch("orders", batch_id, PATIENCE))
    finish(receive(1))
    assert not waiting.done()
    finish(receive(1))  # nobody folds but the one who waits
    assert waiting.result().status is BatchStatus.COMPLETED


def test_waiting_gives_up_after_its_time() -> None:
    batch_id = make(2)
    with pytest.raises(BatchTimeoutError, match="0 of 2 commands have ended") as raised:
        wait_for_batch("orders", batch_id, 0)
    assert isinstance(raised.value, TimeoutError)
    opened = open_batch("orders")
    with pytest.raises(BatchTimeoutError, match="not sealed"):
        wait_for_batch("orders", opened, 0)
    with pytest.raises(InvalidCommandError, match="timeout must be"):
        wait_for_batch("orders", opened, -1)


def test_waiting_for_what_does_not_exist_is_an_error() -> None:
    with pytest.raises(UnknownBatchError):
        wait_for_batch("orders", uuid7(), 1)


def test_waiting_for_a_batch_that_is_not_committed_is_an_error() -> None:
    with transaction.atomic():
        batch_id = make(1)
        with pytest.raises(UncommittedBatchError, match="after the atomic block"):
            wait_for_batch("orders", batch_id, 1)


def test_one_can_wait_in_a_transaction_for_a_batch_that_was_committed_before() -> None:
    batch_id, other = make(1), make(1)
    finish(receive())
    with transaction.atomic():
        assert wait_for_batch("orders", batch_id, PATIENCE).is_complete
        # Folded and committed by itself: others can see it, and nobody is kept from folding.
        with in_another_session() as cursor:
            cursor.execute("SELECT status FROM command_bus_batch WHERE batch_id = %s", [batch_id])
            assert cursor.fetchone() == ("COMPLETED",)
            cursor.execute("SELECT pg_try_advisory_xact_lock(hashtextextended('commandbus.fold_batches', 0))")
            assert cursor.fetchone() == (True,)
    assert batch(other).is_complete


def test_waiting_in_the_transaction_that_sealed_the_batch_is_an_error() -> None:
    batch_id = open_batch("orders")
    with transaction.atomic():
        seal_batch("orders", batch_id)
        with pytest.raises(UncommittedBatchError, match="after the atomic block"):
            wait_for_batch("orders", batch_id, PATIENCE)


def test_waiting_in_the_transaction_that_canceled_the_batch_is_an_error() -> None:
    batch_id = make(2)
    with transaction.atomic():
        cancel_batch("orders", batch_id, "no use")
        with pytest.raises(UncommittedBatchError, match="after the atomic block"):
            wait_for_batch("orders", batch_id, PATIENCE)


def test_waiting_in_the_transaction_that_ended_the_last_command_is_an_error() -> None:
    batch_id = make(1)
    with transaction.atomic():
        finish(receive())
        with pytest.raises(UncommittedBatchError, match="after the atomic block"):
            wait_for_batch("orders", batch_id, PATIENCE)


def test_what_others_do_between_two_looks_is_not_hidden() -> None:
    batch_id = open_batch("orders")
    waiting = _BatchWait("orders", batch_id, 1)
    before = batch(batch_id)
    cancel_batch("orders", batch_id, "no use")
    assert not waiting.is_hidden(inside=before, outside=batch(batch_id))
    assert waiting.is_hidden(inside=batch(batch_id), outside=before)


def test_who_waits_folds_a_part_of_what_others_have_counted() -> None:
    batch_id = make(1)
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO command_bus_batch_delta (batch_id, at)"
            " SELECT '00000000-0000-7000-8000-000000000001', now() FROM generate_series(1, 40001)"
        )
        cursor.execute(
            "INSERT INTO command_bus_batch (batch_id, domain, status)"
            " VALUES ('00000000-0000-7000-8000-000000000001', 'orders', 'PENDING')"
        )
    with pytest.raises(BatchTimeoutError):
        wait_for_batch("orders", batch_id, 0)
    assert BatchDelta.objects.exclude(batch_id=batch_id).count() == 20001


def test_who_cannot_fold_can_wait_all_the_same() -> None:
    batch_id = make(1)
    finish(receive())
    with in_another_session() as cursor:
        cursor.execute("LOCK TABLE command_bus_batch_delta IN EXCLUSIVE MODE")
        with pytest.raises(BatchTimeoutError, match="1 of 1 commands have ended"):
            wait_for_batch("orders", batch_id, 0)
    with connection.cursor() as cursor:
        cursor.execute("SET default_transaction_read_only = on")
        try:
            with pytest.raises(BatchTimeoutError, match="1 of 1 commands have ended"):
                wait_for_batch("orders", batch_id, 0)
        finally:
            cursor.execute("RESET default_transaction_read_only")
    assert wait_for_batch("orders", batch_id, PATIENCE).is_complete


def test_waiting_asynchronously() -> None:
    async def journey() -> BatchMetadata:
        batch_id = await_batch
        return await await_for_batch("orders", batch_id, PATIENCE)

    await_batch = open_batch("orders")
    async_to_sync(aseal_batch)("orders", await_batch)
    assert async_to_sync(journey)().is_complete
