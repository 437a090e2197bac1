"""Cancel, retry, repair, prune: what is done to whole batches."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from django.db import connection
from django.db.models import F

from commandbus import (
    BatchCommand,
    BatchRefusedError,
    BatchRepair,
    BatchStatus,
    InvalidCommandError,
    UnknownBatchError,
    cancel_batch,
    get_batch,
    repair_batches,
    retry_batch,
    send_command,
    uuid7,
)
from commandbus.messages import Status
from commandbus.models import Audit, Batch, Command, Tombstone
from commandbus.pgmq import PgmqClient
from tests.batches.helpers import BUS, batch, counts, events, fail, finish, fold_batches, folded, make, receive, recount
from tests.helpers import BOTH, replies, rows_read

pytestmark = pytest.mark.django_db

AGE = timedelta(days=30)


def test_canceling_a_batch_cancels_what_waits_and_lets_the_rest_go_on() -> None:
    batch_id, other = make(5), make(1)
    ours = [one for one in receive(4) if one.command.batch_id == batch_id][:3]
    finish(ours[:1])
    fail(ours[1:2])
    answer = cancel_batch("orders", batch_id, "wrong file", operator="ada")
    assert (len(answer.done), answer.refused) == (1 if len(ours) == 3 else 2, {})
    assert counts(batch_id) == recount(batch_id)
    canceled = [reply for reply in replies() if reply["outcome"] == "CANCELED"]
    assert {reply["error"]["message"] for reply in canceled} == {"wrong file"}
    assert batch(batch_id).canceled_at is not None
    assert batch(other).canceled_count == 0
    event = Audit.objects.get(batch_id=batch_id, event_type="BATCH_CANCELED")
    assert event.details_json == {"operator": "ada", "reason": "wrong file"}


def test_a_canceled_batch_completes_when_its_last_command_has_ended() -> None:
    batch_id = make(3)
    running = receive(1)
    cancel_batch("orders", batch_id, "no use")
    assert not folded(batch_id).is_complete
    finish(running)
    done = folded(batch_id)
    assert (done.status, counts(batch_id)) == (BatchStatus.COMPLETED_WITH_FAILURES, (3, 1, 0, 2, 0))
    assert events(batch_id) == ["BATCH_SEALED", "BATCH_CANCELED", "BATCH_STARTED", "BATCH_COMPLETED"]


def test_canceling_again_goes_on_where_it_was() -> None:
    batch_id = make(3)
    assert len(cancel_batch("orders", batch_id, "no use", at_most=2).done) == 2
    assert len(cancel_batch("orders", batch_id, "no use").done) == 1
    assert events(batch_id).count("BATCH_CANCELED") == 1


def test_those_in_the_troubleshooting_queue_are_canceled_only_when_asked_for() -> None:
    batch_id = make(2)
    fail(receive())
    assert cancel_batch("orders", batch_id, "no use").done == []
    assert not folded(batch_id).is_complete
    assert len(cancel_batch("orders", batch_id, "no use", troubleshooting=True).done) == 2
    assert folded(batch_id).status is BatchStatus.COMPLETED_WITH_FAILURES


def test_a_complete_batch_cannot_be_canceled() -> None:
    batch_id = make(1)
    finish(receive())
    folded(batch_id)
    with pytest.raises(BatchRefusedError, match="its status is COMPLETED"):
        cancel_batch("orders", batch_id, "too late")
    with pytest.raises(UnknownBatchError):
        cancel_batch("orders", uuid7(), "no use")
    with pytest.raises(InvalidCommandError, match="needs a reason"):
        cancel_batch("orders", batch_id, " ")


def test_retrying_a_batch_retries_what_is_in_the_troubleshooting_queue() -> None:
    batch_id, other = make(3), make(1)
    taken = receive()
    finish([one for one in taken if one.command.batch_id == batch_id][:1])
    fail(taken)
    seen: list[tuple[int, int]] = []
    answer = retry_batch("orders", batch_id, operator="ada", progress=lambda *at: seen.append(at))
    assert (len(answer.done), seen) == (2, [(2, 2)])
    assert (counts(batch_id), counts(other)) == ((3, 1, 0, 0, 0), (1, 0, 0, 0, 1))
    finish(receive())
    assert folded(batch_id).status is BatchStatus.COMPLETED
    assert retry_batch("orders", batch_id).done == []
    with pytest.raises(UnknownBatchError):
        retry_batch("orders", uuid7())


def test_what_waits_for_an_operator_is_found_without_reading_the_rest() -> None:
    batch_id = make(300)
    fail(receive(2))
    finish(receive(1000))
    folded(batch_id)
    before = rows_read("command_bus_command")
    assert len(retry_batch("orders", batch_id).done) == 2
    assert rows_read("command_bus_command") - before < 60


def test_a_healthy_batch_needs_no_repair() -> None:
    batch_id = make(4)
    one, other, third = receive(3)
    finish([one])
    fail([other])
    finish([third], Status.FAILED)
    assert repair_batches("orders") == []  # with what is not folded
    folded(batch_id)
    assert repair_batches("orders") == []  # and without
    assert counts(batch_id) == recount(batch_id) == (4, 1, 1, 0, 1)


def test_repair_recounts_and_says_what_it_changed() -> None:
    batch_id = make(4)
    one, other = receive(2)
    finish([one])
    folded(batch_id)
    fail([other])  # not folded
    Batch.objects.filter(batch_id=batch_id).update(total_count=7, completed_count=3, in_troubleshooting_count=-2)
    progress: list[tuple[int, int]] = []
    assert repair_batches("orders", progress=lambda *at: progress.append(at)) == [
        BatchRepair(batch_id, "total_count", "7", "4"),
        BatchRepair(batch_id, "completed_count", "3", "1"),
        BatchRepair(batch_id, "in_troubleshooting_count", "-1", "1"),
    ]
    assert progress == [(1, 1)]
    assert counts(batch_id) == recount(batch_id)
    assert repair_batches("orders") == []


def test_repair_completes_a_batch_whose_counts_were_lost() -> None:
    batch_id = make(2)
    finish(receive())
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE command_bus_batch_delta")
    assert folded(batch_id).total_count == 0
    assert {repair.what for repair in repair_batches("orders")} == {"total_count", "completed_count"}
    assert folded(batch_id).status is BatchStatus.COMPLETED


def test_repair_sends_a_command_that_could_not_be_sent() -> None:
    client = PgmqClient()
    client.create_queue("passing")
    callback = BatchCommand("SendMail", uuid4(), {}, "passing")
    batch_id = make(1, on_complete=callback)
    finish(receive())
    client.drop_queue("passing")
    assert folded(batch_id).callback_error
    Batch.objects.update(callback_error="another reason")
    [repair] = repair_batches("orders")
    assert (repair.what, repair.before) == ("callback_error", "another reason")
    assert repair.after == batch(batch_id).callback_error  # it still cannot be sent
    assert "BATCH_REPAIRED" not in events(batch_id)
    client.create_queue("passing")
    [repair] = repair_batches("orders")
    assert (repair.what, repair.after) == ("callback_error", None)
    assert batch(batch_id).callback_error is None
    assert batch(batch_id).callback_sent_at is not None
    assert [one.command.command_id for one in receive()] == [callback.command_id]
    assert repair_batches("orders") == []
    assert events(batch_id)[-1] == "BATCH_REPAIRED"


@pytest.mark.parametrize("is_pruned", [False, True])
def test_repair_sends_a_command_whose_id_was_taken_under_a_new_one(is_pruned: bool) -> None:
    taken = uuid4()
    batch_id = make(1, on_complete=BatchCommand("SendMail", taken, {"to": "me"}))
    finish(receive())
    send_command("orders", "PlaceOrder", taken, {})
    assert folded(batch_id).callback_error
    finish(receive())
    if is_pruned:
        grow_old()
        BUS.prune_commands("orders", datetime.now(UTC) - AGE / 2, 100)
    new_id, sent = repair_batches("orders")
    assert (sent.what, sent.after) == ("callback_error", None)
    assert (new_id.what, new_id.before) == ("on_complete", str(taken))
    [called] = receive()
    assert (str(called.command.command_id), called.command.data["to"]) == (new_id.after, "me")
    now = batch(batch_id)
    assert now.on_complete is not None
    assert (now.callback_error, now.on_complete["command_id"]) == (None, new_id.after)
    assert repair_batches("orders") == []


def test_a_repair_of_the_counts_is_in_the_audit() -> None:
    batch_id = make(2)
    folded(batch_id)
    Batch.objects.filter(batch_id=batch_id).update(total_count=9)
    repair_batches("orders", operator="kim")
    [event] = Audit.objects.filter(event_type="BATCH_REPAIRED")
    change = {"what": "total_count", "before": 9, "after": 2}
    assert (event.batch_id, event.details_json) == (batch_id, {"operator": "kim", "changes": [change]})


def test_a_batch_that_is_pruned_meanwhile_stops_no_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, wrong = uuid7(), make(1)
    folded(wrong)
    Batch.objects.filter(batch_id=wrong).update(total_count=5)
    with monkeypatch.context() as patch:
        found = Batch.objects.filter(batch_id=wrong).values_list("batch_id", flat=True)
        patch.setattr(
            "commandbus.models.batch.BatchQuerySet.in_need_of_repair",
            lambda self, domain: type("Found", (), {"values_list": lambda *_, **__: [gone, *found]})(),
        )
        assert [repair.batch_id for repair in repair_batches("orders")] == [wrong]


def test_repairing_a_batch_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(UnknownBatchError):
        BUS.repair_batch("orders", uuid7())


def grow_old() -> None:
    Command.objects.update(created_at=F("created_at") - AGE, updated_at=F("updated_at") - AGE)


def prune() -> tuple[int, int]:
    before = datetime.now(UTC) - AGE / 2
    return BUS.prune_commands("orders", before, 100), BUS.prune_batches("orders", before, 100)


def test_commands_of_a_batch_are_pruned_with_their_batch() -> None:
    batch_id = make(3)
    finish(receive(2))
    last = receive()
    folded(batch_id)
    grow_old()
    assert prune() == (0, 0)  # one has not ended
    finish(last)
    folded(batch_id)
    grow_old()
    assert prune() == (0, 0)  # the batch itself is young
    Batch.objects.update(completed_at=F("completed_at") - AGE)
    assert prune() == (3, 1)
    assert get_batch("orders", batch_id) is None
    assert Tombstone.objects.count() == 3


def test_a_batch_stays_while_one_of_its_commands_does() -> None:
    batch_id = make(3)
    finish(receive())
    folded(batch_id)
    grow_old()
    Batch.objects.update(completed_at=F("completed_at") - AGE)
    before = datetime.now(UTC) - AGE / 2
    assert BUS.prune_commands("orders", before, 2) == 2
    assert BUS.prune_batches("orders", before, 100) == 0
    assert counts(batch_id) == (3, 3, 0, 0, 0)  # what it has counted is not forgotten
    assert repair_batches("orders") == []
    assert prune() == (1, 1)


def test_commands_without_a_batch_are_pruned_as_before() -> None:
    make(1)
    send_command("orders", "PlaceOrder", uuid4(), {})
    finish(one for one in receive() if one.command.batch_id is None)
    grow_old()
    assert prune() == (1, 0)


@pytest.mark.django_db(databases=BOTH)
def test_the_batches_of_all_databases_are_repaired() -> None:
    wrong = [make(1), make(1, domain="archive")]
    for using, batch_id in zip(BOTH, wrong, strict=True):
        fold_batches(using)
        Batch.objects.using(using).filter(batch_id=batch_id).update(total_count=5)
    assert {repair.batch_id for repair in repair_batches()} == set(wrong)
    assert repair_batches() == []
