"""Who completes a batch, and what is sent then."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import DatabaseError, connection, transaction

from commandbus import (
    BatchCommand,
    BatchStatus,
    InvalidCommandError,
    UnknownQueueError,
    add_to_batch,
    create_batch,
    get_command,
    open_batch,
    seal_batch,
    send_command,
    uuid7,
)
from commandbus.folding import fold_batches as fold_anywhere
from commandbus.models import Batch, Domain
from commandbus.pgmq import PgmqClient
from tests.batches.helpers import (
    BUS,
    batch,
    counts,
    events,
    finish,
    fold_batches,
    folded,
    in_another_session,
    make,
    on_complete,
    receive,
    recount,
    some,
)
from tests.helpers import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)


def test_of_many_who_fold_at_once_one_completes_the_batch(others: Callable[..., Future[int]]) -> None:
    for _ in range(5):
        batch_id = make(2, on_complete=on_complete())
        finish(receive())
        gate = threading.Barrier(8)

        def fold(gate: threading.Barrier = gate) -> int:
            connection.ensure_connection()
            gate.wait(PATIENCE)
            return fold_batches("default")

        assert sum(one.result() for one in [others(fold) for _ in range(8)]) == 1
        assert events(batch_id) == ["BATCH_SEALED", "BATCH_STARTED", "BATCH_COMPLETED"]
        assert len(receive()) == 1


def test_who_finds_another_folding_does_not_wait() -> None:
    batch_id = make(1)
    finish(receive())
    with in_another_session() as cursor:
        cursor.execute("SELECT commandbus.fold_batches()")
        assert fold_batches("default") == 0
        assert counts(batch_id) == (1, 1, 0, 0, 0)
        cursor.execute("COMMIT")
    assert batch(batch_id).is_complete


def test_a_batch_that_somebody_has_locked_is_left_for_later_and_the_others_are_folded() -> None:
    locked, free = make(1), make(1)
    finish(receive())
    with in_another_session() as cursor:
        cursor.execute("SELECT FROM command_bus_batch WHERE batch_id = %s FOR UPDATE", [locked])
        assert fold_batches("default") == 1
        assert batch(free).is_complete
        assert counts(locked) == (1, 1, 0, 0, 0)
    assert folded(locked).is_complete


def test_who_finishes_a_command_does_not_wait_for_whoever_has_locked_the_batch() -> None:
    batch_id = make(2)
    taken = receive()
    with in_another_session() as cursor:
        cursor.execute("SELECT FROM command_bus_batch WHERE batch_id = %s FOR UPDATE", [batch_id])
        with connection.cursor() as ours:
            ours.execute("SET lock_timeout = '2s'")
            assert len(finish(taken)) == 2
            ours.execute("RESET lock_timeout")
    assert folded(batch_id).is_complete


def test_who_finishes_holds_no_lock_on_the_batch() -> None:
    batch_id = make(2)
    taken = receive()
    with transaction.atomic():
        finish(taken)
        with in_another_session() as cursor:
            cursor.execute("SET lock_timeout = '2s'")
            cursor.execute("SELECT batch_id FROM command_bus_batch WHERE batch_id = %s FOR UPDATE", [batch_id])
            assert cursor.fetchone() == (batch_id,)


def test_the_on_complete_command_is_sent_with_the_summary_of_the_batch() -> None:
    callback = BatchCommand("SendMail", uuid4(), {"to": "me"}, "orders__replies", uuid4())
    batch_id = create_batch("orders", some(2), name="May", custom_data={"k": [1]}, on_complete=callback)
    one, other = receive()
    finish([one])
    fold_batches("default")
    assert get_command("orders", callback.command_id) is None
    finish([other])
    assert not batch(batch_id).callback_sent_at
    done = folded(batch_id)
    assert done.callback_sent_at is not None
    [sent] = receive()
    assert (sent.command.command_id, sent.command.command_type) == (callback.command_id, "SendMail")
    assert (sent.command.correlation_id, sent.command.batch_id) == (callback.correlation_id, None)
    assert sent.command.data["to"] == "me"
    summary = sent.command.data["batch"]
    assert UUID(summary.pop("batch_id")) == batch_id
    assert datetime.fromisoformat(summary.pop("completed_at")) == done.completed_at
    assert datetime.fromisoformat(summary.pop("started_at")) == done.started_at
    assert datetime.fromisoformat(summary.pop("created_at")) == done.created_at
    assert summary == {
        "domain": "orders",
        "name": "May",
        "custom_data": {"k": [1]},
        "status": "COMPLETED",
        "total_count": 2,
        "completed_count": 2,
        "failed_count": 0,
        "canceled_count": 0,
    }


def test_completion_and_its_command_are_one_transaction() -> None:
    callback = on_complete()
    batch_id = make(1, on_complete=callback)
    finish(receive())
    with transaction.atomic():
        fold_batches("default")
        assert get_command("orders", callback.command_id) is not None
        transaction.set_rollback(True)
    assert not batch(batch_id).is_complete
    assert get_command("orders", callback.command_id) is None
    assert counts(batch_id) == (1, 1, 0, 0, 0)
    assert folded(batch_id).is_complete
    assert get_command("orders", callback.command_id) is not None
    assert events(batch_id).count("BATCH_COMPLETED") == 1


@pytest.mark.parametrize(
    ("callback", "error", "why"),
    [
        (BatchCommand("", uuid4(), {}), InvalidCommandError, "on_complete: .*1 to 255"),
        (BatchCommand("SendMail", uuid4(), {}, "nowhere"), UnknownQueueError, "on_complete: .*nowhere"),
        (BatchCommand("SendMail", uuid4(), {"batch": 1}), InvalidCommandError, 'leave the key "batch" free'),
        (BatchCommand("SendMail", uuid4(), {"a": "x" * 1024 * 1024}), InvalidCommandError, "more bytes"),
        (BatchCommand("SendMail", uuid4(), {"a": "x" * (1024 * 1024 - 50)}), InvalidCommandError, "with the summary"),
        ("SendMail", InvalidCommandError, "a BatchCommand or a function, not 'SendMail'"),
    ],
)
def test_a_command_that_could_not_be_sent_in_the_end_is_refused_in_the_beginning(
    callback: Any, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        make(1, on_complete=callback)
    assert not Batch.objects.exists()


def test_an_on_complete_command_needs_an_id_of_its_own() -> None:
    known = send_command("orders", "PlaceOrder", uuid4(), {})
    with pytest.raises(InvalidCommandError, match=f"its id {known} was sent before"):
        make(1, on_complete=BatchCommand("SendMail", known, {}))
    [one] = some()
    with pytest.raises(InvalidCommandError, match=f"command {one.command_id} has the id of the command that is sent"):
        create_batch("orders", [one], on_complete=BatchCommand("SendMail", one.command_id, {}))
    assert not Batch.objects.exists()


def test_where_ids_are_unique_over_all_domains_so_is_that_of_the_on_complete_command() -> None:
    Domain.objects.update(unique_globally=True)
    known = send_command("reports", "Render", uuid4(), {})
    with pytest.raises(InvalidCommandError, match=f"its id {known} was sent before"):
        make(1, on_complete=BatchCommand("SendMail", known, {}))


@pytest.mark.parametrize("on_complete", ["null", '"x"', "[]", "{}", '{"command_id": "x"}', '{"delay": "y"}'])
def test_sql_refuses_an_on_complete_command_that_is_none(on_complete: str) -> None:
    with connection.cursor() as cursor, pytest.raises(DatabaseError, match="cannot be sent") as raised:
        cursor.execute("SELECT commandbus.open_batch('orders', %s, on_complete => %s::jsonb)", [uuid7(), on_complete])
    assert getattr(raised.value.__cause__, "sqlstate", None) == "CB002"


def test_a_batch_whose_command_cannot_be_sent_completes_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    taken = uuid4()
    batch_id = make(1, on_complete=BatchCommand("SendMail", taken, {}))
    finish(receive())
    send_command("orders", "PlaceOrder", taken, {})
    with caplog.at_level("INFO"):
        done = folded(batch_id)
    assert done.status is BatchStatus.COMPLETED
    assert done.callback_sent_at is None
    assert done.callback_error is not None
    assert f"a command with its id {taken} was sent before" in done.callback_error
    assert f"batch.callback_failed domain=orders batch_id={batch_id}" in caplog.text
    assert f"batch.completed domain=orders batch_id={batch_id} status=COMPLETED" in caplog.text


def test_a_reply_queue_that_is_gone_does_not_stop_the_completion() -> None:
    client = PgmqClient()
    client.create_queue("passing")
    batch_id = make(1, on_complete=BatchCommand("SendMail", uuid4(), {}, "passing"))
    other = make(1)
    finish(receive())
    client.drop_queue("passing")
    assert fold_batches("default") == 2
    assert "there is no reply queue 'passing'" in (batch(batch_id).callback_error or "")
    assert batch(other).is_complete


def test_who_is_just_sending_the_same_id_holds_up_only_that_batch() -> None:
    taken = uuid4()
    batch_id, other_batch = make(1, on_complete=BatchCommand("SendMail", taken, {})), make(1)
    finish(receive())
    with in_another_session() as cursor:
        cursor.execute("SELECT commandbus.send('orders', ARRAY[%s::uuid], ARRAY['Other'], ARRAY['{}'::jsonb])", [taken])
        assert fold_batches("default") == 1
        assert batch(other_batch).is_complete
        assert not batch(batch_id).is_complete
    done = folded(batch_id)
    assert (done.status, done.callback_error) == (BatchStatus.COMPLETED, None)
    assert events(batch_id).count("BATCH_COMPLETED") == 1


def test_a_batch_that_postgresql_cannot_complete_holds_up_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = make(1, on_complete=on_complete()), make(1)
    finish(receive())
    with connection.cursor() as cursor:
        cursor.execute(
            """
            CREATE FUNCTION break_down() RETURNS trigger LANGUAGE plpgsql AS
            $$BEGIN RAISE 'a page is broken' USING ERRCODE = 'XX001'; END$$;
            CREATE TRIGGER break_down BEFORE INSERT ON pgmq.q_orders__commands EXECUTE FUNCTION break_down()
            """
        )
        try:
            assert fold_batches() == 1
            assert (batch(bad).is_complete, batch(good).is_complete) == (False, True)
            assert f"batch.postponed domain=orders batch_id={bad} error=a page is broken" in caplog.text
        finally:
            cursor.execute("DROP FUNCTION break_down CASCADE")
    assert folded(bad).callback_sent_at is not None
    assert counts(bad) == (1, 1, 0, 0, 0)


def test_without_autocommit_nothing_is_folded_in_the_callers_transaction() -> None:
    batch_id = open_batch("orders")
    transaction.set_autocommit(False)
    try:
        seal_batch("orders", batch_id)
        assert not batch(batch_id).is_open
        transaction.commit()
        finish(receive())
        fold_anywhere("default")
        with in_another_session() as cursor:
            cursor.execute("SELECT status FROM command_bus_batch WHERE batch_id = %s", [batch_id])
            assert cursor.fetchone() == ("COMPLETED",)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


def test_who_may_not_send_to_a_domain_leaves_its_batches_to_others() -> None:
    batch_id, free = make(1, on_complete=on_complete()), make(1)
    finish(receive())
    with connection.cursor() as cursor:
        cursor.execute("DROP ROLE IF EXISTS commandbus_folder")
        cursor.execute("CREATE ROLE commandbus_folder")
        try:
            cursor.execute("GRANT USAGE ON SCHEMA commandbus, pgmq TO commandbus_folder")
            cursor.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO commandbus_folder")
            cursor.execute("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO commandbus_folder")
            cursor.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA commandbus, pgmq TO commandbus_folder")
            cursor.execute("SET ROLE commandbus_folder")
            assert fold_batches() == 1
            cursor.execute("RESET ROLE")
            assert (batch(free).is_complete, batch(batch_id).is_complete) == (True, False)
            assert fold_batches() == 1
            assert batch(batch_id).callback_sent_at is not None
        finally:
            cursor.execute("RESET ROLE")
            cursor.execute("DROP OWNED BY commandbus_folder")
            cursor.execute("DROP ROLE commandbus_folder")


def test_one_call_folds_so_many_batches_and_says_where_to_go_on() -> None:
    ids = sorted(make(2) for _ in range(5))
    finish(receive())
    calls = fold_in_calls(at_most=2)
    assert [len(completed) for completed in calls] == [2, 2, 1]
    assert all(batch(batch_id).is_complete for batch_id in ids)


def test_a_batch_is_folded_in_parts_and_completes_with_the_last() -> None:
    batch_id, other = open_batch("orders"), make(1)
    for _ in range(4):
        add_to_batch("orders", batch_id, some(2))
    while taken := receive(1):
        finish(taken)
    BUS.seal_batch("orders", batch_id)
    calls = fold_in_calls(most_deltas=3)
    assert len(calls) > 3
    assert sorted(one["batch_id"] for completed in calls for one in completed) == sorted([str(batch_id), str(other)])
    assert (counts(batch_id), recount(batch_id)) == ((8, 8, 0, 0, 0), (8, 8, 0, 0, 0))


def test_a_part_of_the_counts_never_completes_a_batch() -> None:
    batch_id = open_batch("orders")
    add_to_batch("orders", batch_id, some(1))
    finish(receive())
    add_to_batch("orders", batch_id, some(1))  # counted after the first has ended
    with connection.cursor() as cursor:
        cursor.execute("SELECT commandbus.seal_batch('orders', %s)", [batch_id])
        for deltas in range(1, 4):
            cursor.execute("SELECT completed FROM commandbus.fold_batches(most_deltas => %s)", [deltas])
            assert cursor.fetchone() == ("[]",)
    assert counts(batch_id) == (2, 1, 0, 0, 0)


def fold_in_calls(**limits: int) -> list[list[dict[str, Any]]]:
    calls, after = [], None
    while True:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT completed, next_after FROM commandbus.fold_batches(%s, %s, %s)",
                [after, limits.get("at_most", 200), limits.get("most_deltas", 20000)],
            )
            completed, after = cursor.fetchone()
        calls.append(json.loads(completed))
        if after is None:
            return calls
