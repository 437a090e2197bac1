"""What a batch counts is what its commands are, at any moment, whoever changes them."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.db import connection, transaction

from commandbus import (
    BatchCommand,
    BatchStatus,
    cancel_command,
    create_batch,
    open_batch,
    ops,
    seal_batch,
    send_command,
)
from commandbus.messages import Status
from commandbus.models import Audit, BatchDelta, Command
from commandbus.testing.time import advance
from tests.batches.helpers import (
    BUS,
    batch,
    counts,
    events,
    fail,
    finish,
    fold_batches,
    folded,
    make,
    receive,
    recount,
    some,
)

pytestmark = pytest.mark.django_db


def test_a_batch_starts_with_the_first_command_that_is_received() -> None:
    batch_id = make(3)
    assert batch(batch_id).status is BatchStatus.PENDING
    receive(1)
    seen = batch(batch_id)
    assert seen.status is BatchStatus.IN_PROGRESS
    assert seen.started_at is not None
    assert folded(batch_id).started_at == seen.started_at
    receive(2)
    assert not BatchDelta.objects.exists()  # that it has started is known by now
    assert folded(batch_id).started_at == seen.started_at
    assert events(batch_id) == ["BATCH_SEALED", "BATCH_STARTED"]


def test_a_batch_whose_commands_all_succeed_is_completed() -> None:
    batch_id = make(3)
    first = receive(2)
    finish(first)
    assert counts(batch_id) == (3, 2, 0, 0, 0)
    assert folded(batch_id).status is BatchStatus.IN_PROGRESS
    finish(receive())
    before = batch(batch_id)
    assert (before.completed_count, before.is_complete) == (3, False)  # counted, but nobody has said so yet
    done = folded(batch_id)
    assert (done.status, counts(batch_id)) == (BatchStatus.COMPLETED, (3, 3, 0, 0, 0))
    assert done.completed_at is not None
    assert done.started_at is not None
    assert done.completed_at >= done.started_at
    last = Command.objects.filter(batch_id=batch_id).latest("updated_at")
    assert done.completed_at == last.updated_at
    assert events(batch_id) == ["BATCH_SEALED", "BATCH_STARTED", "BATCH_COMPLETED"]
    details = Audit.objects.get(batch_id=batch_id, event_type="BATCH_COMPLETED").details_json
    assert details is not None
    assert details["status"] == "COMPLETED"
    assert (details["total_count"], details["completed_count"]) == (3, 3)


@pytest.mark.parametrize("status", [Status.FAILED, Status.CANCELED])
def test_a_batch_with_one_that_did_not_succeed_is_completed_with_failures(status: Status) -> None:
    batch_id = make(2)
    one, other = receive()
    finish([one])
    finish([other], status)
    done = folded(batch_id)
    assert done.status is BatchStatus.COMPLETED_WITH_FAILURES
    assert counts(batch_id) == recount(batch_id)
    assert done.failed_count == (status is Status.FAILED)
    assert done.canceled_count == (status is Status.CANCELED)


def test_a_failure_that_is_tried_again_counts_for_nothing() -> None:
    batch_id = make(1)
    fail(receive(), delay=0.0)
    assert counts(batch_id) == (1, 0, 0, 0, 0)
    finish(receive())
    assert folded(batch_id).status is BatchStatus.COMPLETED


def test_a_batch_with_a_command_in_the_troubleshooting_queue_is_not_complete() -> None:
    batch_id = make(2)
    one, other = receive()
    finish([one])
    fail([other])
    assert counts(batch_id) == (2, 1, 0, 0, 1)
    assert not folded(batch_id).is_complete
    assert counts(batch_id) == (2, 1, 0, 0, 1)


@pytest.mark.parametrize("fold", [True, False])
def test_an_operators_decisions_are_counted(fold: bool) -> None:
    batch_id = make(4)
    taken = receive()
    fail(taken)
    completed, canceled, retried, edited = (one.command.command_id for one in taken)
    if fold:
        fold_batches("default")
    ops.operator_complete("orders", completed)
    ops.operator_cancel("orders", canceled, "no use")
    assert counts(batch_id) == (4, 1, 0, 1, 2)
    ops.operator_retry("orders", retried)
    ops.operator_edit("orders", edited, {"better": True})
    assert counts(batch_id) == (4, 1, 0, 1, 0)
    if fold:
        fold_batches("default")
    fail(receive())
    assert counts(batch_id) == (4, 1, 0, 1, 2)
    ops.operator_complete_many("orders", [retried, edited])
    done = folded(batch_id)
    assert (done.status, counts(batch_id)) == (BatchStatus.COMPLETED_WITH_FAILURES, (4, 3, 0, 1, 0))
    assert counts(batch_id) == recount(batch_id)


def test_what_an_operator_completes_counts_as_completed() -> None:
    batch_id = make(1)
    [one] = receive()
    fail([one])
    ops.operator_complete("orders", one.command.command_id)
    assert folded(batch_id).status is BatchStatus.COMPLETED


def test_a_refused_action_counts_nothing() -> None:
    batch_id = make(1)
    [one] = receive()
    fail([one])
    ids = [one.command.command_id, uuid4()]
    assert ops.operator_retry_many("orders", ids).done == ids[:1]
    assert ops.operator_retry_many("orders", ids).done == []
    assert ops.operator_complete_many("orders", ids).done == []
    assert counts(batch_id) == (1, 0, 0, 0, 0)


def test_a_batch_that_is_canceled_before_it_starts_completes_without_having_started() -> None:
    commands = some(2)
    batch_id = create_batch("orders", commands)
    for command in commands:
        cancel_command("orders", command.command_id)
    done = folded(batch_id)
    assert (done.status, done.started_at) == (BatchStatus.COMPLETED_WITH_FAILURES, None)
    assert events(batch_id) == ["BATCH_SEALED", "BATCH_COMPLETED"]


def test_an_unknown_type_and_a_killer_are_counted_in_the_troubleshooting_queue() -> None:
    batch_id = create_batch("orders", some(2, "NobodyHandlesThis"))
    one, other = receive()
    BUS.unhandled("orders", [one.lease], grace=0)
    assert counts(batch_id) == (2, 0, 0, 0, 1)
    row = Command.objects.get(command_id=other.command.command_id)
    Command.objects.filter(id=row.id).update(lease_read_ct=None, lease_expires_at=None, status="PENDING")
    with connection.cursor() as cursor:
        cursor.execute("SELECT commandbus.convict('orders', ARRAY[%s]::bigint[])", [row.id])
    assert counts(batch_id) == recount(batch_id) == (2, 0, 0, 0, 2)


def test_a_late_worker_counts_nothing() -> None:
    batch_id = make(1)
    late = receive()
    BUS.release("orders", [late[0].lease])
    again = receive()
    assert finish(late) == set()
    finish(again)
    assert finish(again) == set()
    assert counts(batch_id) == (1, 1, 0, 0, 0)


def test_several_batches_are_counted_apart_in_one_call() -> None:
    first, second = make(2), make(3)
    alone = send_command("orders", "PlaceOrder", uuid4(), {})
    taken = receive()
    assert len(taken) == 6
    assert alone in finish(taken)
    assert (counts(first), counts(second)) == ((2, 2, 0, 0, 0), (3, 3, 0, 0, 0))
    assert BatchDelta.objects.filter(completed_count__gt=0).count() == 2
    assert fold_batches("default") == 2
    assert not BatchDelta.objects.exists()


def test_folding_twice_counts_once() -> None:
    batch_id = make(2)
    finish(receive(1))
    fold_batches("default")
    fold_batches("default")
    assert counts(batch_id) == (2, 1, 0, 0, 0)


def test_what_is_rolled_back_is_not_counted() -> None:
    batch_id = make(1)
    taken = receive()
    with transaction.atomic():
        finish(taken)
        transaction.set_rollback(True)
    assert counts(batch_id) == (1, 0, 0, 0, 0)


def test_an_open_batch_does_not_complete_before_it_is_sealed() -> None:
    batch_id = open_batch("orders")
    BUS.send("orders", some(2), batch_id=batch_id)
    finish(receive())
    assert not folded(batch_id).is_complete
    assert seal_batch("orders", batch_id).total_count == 2
    assert folded(batch_id).status is BatchStatus.COMPLETED


def test_an_empty_batch_completes_when_it_is_sealed() -> None:
    batch_id = open_batch("orders", on_complete=BatchCommand("SendMail", uuid4(), {}))
    assert not folded(batch_id).is_complete
    seal_batch("orders", batch_id)
    done = folded(batch_id)
    assert (done.status, done.total_count) == (BatchStatus.COMPLETED, 0)
    assert [one.command.command_type for one in receive()] == ["SendMail"]


def test_commands_of_a_batch_are_counted_where_nothing_shows_that_they_run() -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE command_bus_domain SET mark_in_progress = false WHERE name = 'orders'")
    batch_id = make(2)
    taken = receive(1)
    assert batch(batch_id).status is BatchStatus.IN_PROGRESS
    finish(taken)
    finish(receive())
    assert folded(batch_id).status is BatchStatus.COMPLETED


def test_a_lease_that_runs_out_is_counted_once() -> None:
    batch_id = make(1)
    receive(vt=10)
    advance("orders", 20)
    finish(receive())
    assert folded(batch_id).status is BatchStatus.COMPLETED
    assert counts(batch_id) == (1, 1, 0, 0, 0)


def test_a_count_without_its_batch_does_not_stop_the_others() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO command_bus_batch_delta (batch_id, completed_count, at) VALUES (%s, 1, now())", [uuid4()]
        )
    assert fold_batches("default") == 0  # somebody has tampered with the table; the others are folded
    batch_id = make(1)
    finish(receive())
    assert folded(batch_id).is_complete
