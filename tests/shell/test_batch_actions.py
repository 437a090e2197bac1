from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import pytest
from django.db import OperationalError

from commandbus import open_batch
from commandbus.models import Audit, Batch, Command
from commandbus.ops import troubleshooting as ops_troubleshooting
from commandbus.transitions import PostgresTransitions
from tests.batches.helpers import BUS, batch, counts, events, fail, finish, folded, make, on_complete, receive, some
from tests.helpers import BOTH, reload, status
from tests.shell.helpers import Ran, Terminal, run, type_in

pytestmark = pytest.mark.django_db


def act(*arguments: object, **streams: Any) -> Ran:
    return run("commandbus_batch", *(str(one) for one in arguments), **streams)


def ids(batch_id: UUID) -> list[UUID]:
    return list(Command.objects.filter(batch_id=batch_id).order_by("id").values_list("command_id", flat=True))


def troubled(count: int = 2) -> UUID:
    """A batch whose commands all are in the Troubleshooting Queue."""
    batch_id = make(count)
    fail(receive())
    return batch_id


def details(batch_id: UUID, event: str) -> dict[str, Any]:
    return Audit.objects.get(batch_id=batch_id, command_id=None, event_type=event).details_json or {}


def test_a_canceled_batch_ends_with_the_reason_in_every_reply() -> None:
    batch_id = make(3)
    ran = act("cancel", "orders", batch_id, "--reason", "not needed", "--operator", "alice", "--yes")
    assert (ran.code, ran.out) == (0, "done 3, refused 0\n")
    assert ran.err.startswith("3 commands, ")
    assert folded(batch_id).status == "COMPLETED_WITH_FAILURES"
    assert details(batch_id, "BATCH_CANCELED") == {"operator": "alice", "reason": "not needed"}
    reply = reload(ids(batch_id)[0]).reply
    assert reply is not None
    assert reply["error"]["message"] == "not needed"


def test_what_runs_or_is_in_trouble_is_left_and_told() -> None:
    batch_id = make(4)
    running, other = receive(2)
    fail([other])
    ran = act("cancel", "orders", batch_id, "--reason", "over", "--yes")
    assert (ran.code, ran.lines) == (
        0,
        ["done 2, refused 0", "left: 1 that runs, and may be tried again, 1 in troubleshooting"],
    )
    assert counts(batch_id) == (4, 0, 0, 2, 1)
    ran = act("cancel", "orders", batch_id, "--reason", "over", "--yes", "--troubleshooting")
    assert (ran.code, ran.lines) == (0, ["done 1, refused 0", "left: 1 that runs, and may be tried again"])
    finish([running])
    assert folded(batch_id).is_complete


def test_a_cancel_of_all_has_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_troubleshooting, "CHUNK", 1)
    batch_id = make(4)
    fail(receive(2))
    ran = act("cancel", "orders", batch_id, "--reason", "over", "--yes", "--troubleshooting", stderr=Terminal())
    assert ran.out == "done 4, refused 0\n"
    assert "]  25 %  1 command, " in ran.err
    assert "] 100 %  4 commands, " in ran.err
    assert folded(batch_id).is_complete


def test_an_open_batch_is_sealed_by_its_cancel() -> None:
    batch_id = open_batch("orders", 5)
    assert act("cancel", "orders", batch_id, "--reason", "over", "--yes").out == "done 0, refused 0\n"
    assert folded(batch_id).is_complete


def test_a_batch_that_has_ended_cannot_be_canceled_and_nobody_is_asked() -> None:
    batch_id = make(1)
    finish(receive())
    folded(batch_id)
    for option in ("--yes", "--dry-run", "-v0"):
        ran = act("cancel", "orders", batch_id, "--reason", "over", option)
        assert (ran.code, ran.out) == (1, "")
        assert f"batch {batch_id} cannot be canceled: its status is COMPLETED" in ran.err


def test_a_reason_that_says_nothing_is_refused() -> None:
    batch_id = make(1)
    ran = act("cancel", "orders", batch_id, "--reason", " ", "--yes")
    assert "needs a reason" in ran.err
    assert batch(batch_id).canceled_at is None


@pytest.mark.parametrize(
    ("words", "question"),
    [
        (["cancel", "--reason", "x"], "Cancel batch ID of orders: 1 waiting command?"),
        (
            ["cancel", "--reason", "x", "--troubleshooting"],
            "Cancel batch ID of orders: 1 waiting command, 2 in t",
        ),
        (["retry"], "Retry 2 commands of batch ID of orders?"),
    ],
)
@pytest.mark.parametrize("answer", ["y\n", "n\n", ""])
def test_a_person_is_asked_first(monkeypatch: pytest.MonkeyPatch, words: list[str], question: str, answer: str) -> None:
    batch_id = make(3)
    fail(receive(2))
    type_in(monkeypatch, answer.encode(), terminal=True)
    ran = act(words[0], "orders", batch_id, *words[1:])
    assert ran.err.startswith(question.replace("ID", str(batch_id)))
    assert "? [y/N] " in ran.err
    untouched = not batch(batch_id).canceled_at and counts(batch_id) == (3, 0, 0, 0, 2)
    assert (ran.code, untouched) == ((0, False) if answer == "y\n" else (1, True))
    assert ("nothing was done" in ran.err) == untouched


@pytest.mark.parametrize("words", [["cancel", "--reason", "x"], ["retry"]])
def test_without_a_terminal_nobody_can_be_asked(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    batch_id = troubled()
    type_in(monkeypatch, b"y\n")
    ran = act(words[0], "orders", batch_id, *words[1:])
    assert ran.code == 1
    assert "Nobody can be asked" in ran.err
    assert counts(batch_id) == (2, 0, 0, 0, 2)


def test_dry_runs_say_what_would_be_done() -> None:
    batch_id = make(3)
    taken = receive(2)
    fail(taken)
    ran = act("cancel", "orders", batch_id, "--reason", "x", "--dry-run", "--troubleshooting")
    assert ran.out == f"would cancel batch {batch_id} of orders: 1 waiting command, 2 in troubleshooting\n"
    ran = act("retry", "orders", batch_id, "--dry-run")
    assert ran.lines[0] == f"would retry 2 commands of batch {batch_id} of orders"
    assert {row.split()[0] for row in ran.lines[2:]} == {str(one.command.command_id) for one in taken}
    assert (counts(batch_id), batch(batch_id).canceled_at) == ((3, 0, 0, 0, 2), None)


def test_a_retry_sends_again_what_is_in_the_troubleshooting_queue() -> None:
    batch_id, other = troubled(), troubled()
    ran = act("retry", "orders", batch_id, "--operator", "alice", "--reason", "the bank is back", "--yes")
    assert (ran.code, ran.out) == (0, "done 2, refused 0\n")
    assert counts(batch_id) == (2, 0, 0, 0, 0)
    assert counts(other) == (2, 0, 0, 0, 2)
    event = Audit.objects.filter(command_id=ids(batch_id)[0]).latest("audit_id")
    assert event.event_type == "OPERATOR_RETRY"
    assert event.details_json is not None
    assert (event.details_json["operator"], event.details_json["reason"]) == ("alice", "the bank is back")


def test_a_retry_of_a_batch_without_trouble_does_nothing() -> None:
    batch_id = make(1)
    ran = act("retry", "orders", batch_id)
    assert (ran.code, ran.out) == (
        *(0, f"nothing like that is in the Troubleshooting Queue of batch {batch_id} of orders\n"),
    )


def test_what_fails_while_the_question_is_asked_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = make(2)
    fail(receive(1))
    type_in(monkeypatch, b"y\n", terminal=True)

    class Slow(Terminal):
        def flush(self) -> None:
            fail(receive())

    assert act("retry", "orders", batch_id, stderr=Slow()).out == "done 1, refused 0\n"
    assert counts(batch_id) == (2, 0, 0, 0, 1)


def test_a_command_that_a_worker_takes_meanwhile_is_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = make(2)
    real: Callable[..., Any] = PostgresTransitions.cancel

    def late(self: PostgresTransitions, *arguments: Any, **options: Any) -> Any:
        receive(1)
        return real(self, *arguments, **options)

    monkeypatch.setattr(PostgresTransitions, "cancel", late)
    ran = act("cancel", "orders", batch_id, "--reason", "x", "--yes")
    assert (ran.code, ran.lines) == (1, ["done 1, refused 1", "left: 1 that runs, and may be tried again"])
    running = Command.objects.get(status="IN_PROGRESS")
    assert f"{running.command_id}: " in ran.err


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted; 1 of 3 commands were dealt with, and that stays"),
        (OperationalError("gone\n"), 1, "stopped: gone; 1 of 3 commands were dealt with, and that stays"),
    ],
)
def test_whatever_stops_a_cancel_the_same_again_goes_on(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    batch_id = make(3)
    second = ids(batch_id)[1]
    monkeypatch.setattr(ops_troubleshooting, "CHUNK", 1)
    real: Callable[..., Any] = PostgresTransitions.cancel

    def stop(self: PostgresTransitions, domain: str, command_ids: Sequence[UUID], *rest: Any, **more: Any) -> Any:
        if command_ids == [second]:
            raise error
        return real(self, domain, command_ids, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(PostgresTransitions, "cancel", stop)
        ran = act("cancel", "orders", batch_id, "--reason", "x", "--yes")
    assert (ran.code, ran.out) == (code, "")
    assert words in ran.err
    assert status(second) == "PENDING"
    assert act("cancel", "orders", batch_id, "--reason", "x", "--yes").out == "done 2, refused 0\n"
    assert folded(batch_id).is_complete


def test_the_operator_is_who_is_logged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getlogin", lambda: "alice")
    first, second = make(1), open_batch("orders")
    act("cancel", "orders", first, "--reason", "x", "--yes")
    act("seal", "orders", second)
    assert details(first, "BATCH_CANCELED")["operator"] == "alice"
    assert details(second, "BATCH_SEALED")["operator"] == "alice"


def test_a_batch_is_sealed_once() -> None:
    batch_id = open_batch("orders")
    BUS.send("orders", some(2), batch_id=batch_id)
    ran = act("seal", "orders", batch_id, "--operator", "alice")
    assert (ran.code, ran.out) == (0, "sealed, with 2 commands\n")
    assert details(batch_id, "BATCH_SEALED") == {"operator": "alice", "total_count": 2}
    sealed_at = batch(batch_id).sealed_at
    assert sealed_at is not None
    assert act("seal", "orders", batch_id).out.startswith("it was sealed before, at ")
    assert batch(batch_id).sealed_at == sealed_at
    assert act("seal", "orders", batch_id, "-v", "0").out == ""


def test_a_batch_without_all_that_was_expected_is_sealed_only_on_demand() -> None:
    batch_id = open_batch("orders", 3)
    BUS.send("orders", some(2), batch_id=batch_id)
    ran = act("seal", "orders", batch_id)
    assert (ran.code, ran.out) == (1, "")
    assert f"batch {batch_id} has 2 commands, but 3 were expected" in ran.err
    assert batch(batch_id).is_open
    assert act("seal", "orders", batch_id, "--allow-incomplete").code == 0
    assert not batch(batch_id).is_open


@pytest.mark.django_db(databases=BOTH)
def test_a_repair_says_what_it_has_changed() -> None:
    wrong, right = make(2), make(1)
    finish(receive(1))
    Batch.objects.filter(batch_id=wrong).update(failed_count=7)
    ran = act("repair", "orders")
    assert ran.code == 0
    assert ran.lines[0].split() == ["BATCH", "WHAT", "BEFORE", "AFTER"]
    assert [row.split() for row in ran.lines[1:]] == [[str(wrong), "failed_count", "7", "0"]]
    assert ran.err.startswith("2 batches, ")
    assert str(right) not in ran.out
    assert act("repair").out == "nothing had to be corrected\n"
    assert counts(wrong) == (2, 1, 0, 0, 0)


def test_a_repair_of_nothing_and_a_silent_one() -> None:
    assert act("repair", "orders").out == "nothing had to be corrected\n"
    batch_id = make(1)
    Batch.objects.filter(batch_id=batch_id).update(failed_count=7)
    assert act("repair", "-v", "0", "orders") == Ran(0, "", "")
    assert counts(batch_id) == (1, 0, 0, 0, 0)


def test_a_batch_that_cannot_be_repaired_is_told() -> None:
    wrong, broken = make(1), make(1, on_complete=on_complete())
    finish(receive(2))
    folded(broken)
    Batch.objects.filter(batch_id=broken).update(callback_error="?", on_complete={"command_id": "none"})
    make(1)
    Batch.objects.filter(batch_id=wrong).update(callback_error="?")
    ran = act("repair", "orders")
    assert ran.code == 1
    found = {row.split()[0]: row.split("  ")[1].strip() for row in ran.lines[1:]}
    assert found == {str(wrong): "callback_error", str(broken): "error"}
    assert 'invalid input syntax for type uuid: "none"' in ran.out


def test_who_repairs_is_in_the_audit() -> None:
    batch_id = make(1)
    Batch.objects.filter(batch_id=batch_id).update(failed_count=7)
    act("repair", "orders", "--operator", "alice")
    change = {"what": "failed_count", "before": 7, "after": 0}
    assert details(batch_id, "BATCH_REPAIRED") == {"operator": "alice", "changes": [change]}


def test_a_command_in_the_end_that_is_sent_by_a_repair_is_told() -> None:
    batch_id = make(1)
    finish(receive())
    folded(batch_id)
    Batch.objects.update(callback_error="its queue \x1b is gone")
    ran = act("repair", "orders")
    assert ran.lines[1].split("  ")[1:] == ["callback_error", "its queue \\x1b is gone", "-"]


@pytest.mark.django_db(databases=BOTH)
def test_a_repair_has_a_bar() -> None:
    make(1), make(1)
    ran = act("repair", stderr=Terminal())
    assert "]  50 %  1 batch, " in ran.err
    assert "] 100 %  2 batches, " in ran.err


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def lose_the_database() -> None:
    raise OperationalError("gone\n")


@pytest.mark.parametrize(
    ("what", "code", "words", "left"),
    [(interrupt, 130, "interrupted; 2 of 3 batches", 1), (lose_the_database, 1, "stopped: gone; 1 of 3 batches", 2)],
)
def test_whatever_stops_a_repair_what_it_did_stays(
    monkeypatch: pytest.MonkeyPatch, what: Callable[[], None], code: int, words: str, left: int
) -> None:
    for _ in range(3):
        make(1)
    Batch.objects.update(failed_count=7)
    real: Callable[..., Any] = PostgresTransitions.repair_batch
    calls: list[UUID] = []

    def stop(self: PostgresTransitions, domain: str, batch_id: UUID, operator: str | None) -> Any:
        calls.append(batch_id)
        if len(calls) == 2:
            what()
        return real(self, domain, batch_id, operator)

    monkeypatch.setattr(PostgresTransitions, "repair_batch", stop)
    monkeypatch.setattr("django.db.backends.postgresql.base.DatabaseWrapper.is_usable", lambda self: False)
    ran = act("repair", "orders")
    assert (ran.code, ran.out) == (code, "")
    assert f"{words} were looked at, and what was corrected stays" in ran.err
    assert Batch.objects.filter(failed_count=7).count() == left


def test_the_events_of_a_batch_that_was_canceled_and_has_ended() -> None:
    batch_id = make(1)
    act("cancel", "orders", batch_id, "--reason", "x", "--yes")
    folded(batch_id)
    assert events(batch_id) == ["BATCH_SEALED", "BATCH_CANCELED", "BATCH_COMPLETED"]
