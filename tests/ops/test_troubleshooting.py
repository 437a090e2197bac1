from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import DatabaseError, connection, transaction
from django.utils import timezone

from commandbus import (
    CommandRefusedError,
    DuplicateCommandError,
    InvalidCommandError,
    UnknownDomainError,
    audit_trail,
    ops,
    send_command,
)
from commandbus.messages import ErrorInfo, Failure, NewCommand
from commandbus.models import Audit, Command, Domain, PayloadArchive
from commandbus.ops import TroubleshootingFilter, troubleshooting
from commandbus.pgmq import PgmqClient
from commandbus.transitions import PostgresTransitions
from tests.helpers import reload, replies, send, status

pytestmark = pytest.mark.django_db

BUS = PostgresTransitions("default")
TSQ = "IN_TROUBLESHOOTING_QUEUE"


def troubled(command_type: str = "PlaceOrder", code: str = "NEVER", **data: Any) -> UUID:
    """A command that waits for an operator."""
    command_id = send(command_type, **data)
    [received] = BUS.receive("orders", qty=1, vt=30)
    BUS.fail("orders", [Failure(received.lease, ErrorInfo("Broken", code, "it cannot work"))])
    return command_id


def many_troubled(count: int) -> list[UUID]:
    ids = [uuid4() for _ in range(count)]
    BUS.send("orders", [NewCommand("PlaceOrder", command_id, {}) for command_id in ids])
    received = BUS.receive("orders", qty=count, vt=30)
    error = ErrorInfo("Broken", "NEVER", "it cannot work")
    BUS.fail("orders", [Failure(one.lease, error) for one in received])
    return ids


def last_event(command_id: UUID) -> Any:
    return audit_trail("orders", command_id)[-1]


def test_the_list_has_what_waits_for_an_operator_and_can_be_narrowed() -> None:
    send("PlaceOrder")
    assert BUS.receive("orders", qty=1, vt=30)  # it runs
    first, second = troubled("PlaceOrder", "NEVER"), troubled("SendMail", "NO_MAIL")

    def listed(**options: Any) -> list[UUID]:
        return [command.command_id for command in ops.list_troubleshooting("orders", **options)]

    assert listed() == [second, first]
    assert listed(limit=1) == [second]
    assert listed(type="PlaceOrder") == [first]
    assert listed(error_code="NO_MAIL") == [second]
    assert listed(error_type="Broken") == [second, first]
    assert listed(error_type="Other") == []
    assert ops.list_troubleshooting("other") == []
    with pytest.raises(UnknownDomainError, match="odrers"):
        ops.list_troubleshooting("odrers")


def test_retry_sends_it_again_and_names_the_operator() -> None:
    command_id = troubled(n=1)
    ops.operator_retry("orders", command_id, operator="mary", reason="the bank is back")
    assert status(command_id) == "PENDING"
    event = last_event(command_id)
    assert event.event_type == "OPERATOR_RETRY"
    assert event.details_json["operator"] == "mary"
    assert event.details_json["reason"] == "the bank is back"
    [received] = BUS.receive("orders", qty=1, vt=30)
    assert (received.command.command_id, received.command.data, received.attempt) == (command_id, {"n": 1}, 1)


def test_cancel_and_complete_answer_the_sender() -> None:
    canceled, completed, bare = troubled(), troubled(), troubled()
    ops.operator_cancel("orders", canceled, "not needed any more", operator="mary")
    ops.operator_complete("orders", completed, {"booked": "by hand"}, operator="mary", reason="phoned the bank")
    ops.operator_complete("orders", bare)
    assert [status(one) for one in (canceled, completed, bare)] == ["CANCELED", "COMPLETED", "COMPLETED"]
    by_id = {UUID(reply["command_id"]): reply for reply in replies()}
    assert by_id[canceled]["outcome"] == "CANCELED"
    assert by_id[canceled]["error"]["message"] == "not needed any more"
    assert by_id[completed]["outcome"] == "SUCCESS"
    assert by_id[completed]["data"] == {"booked": "by hand"}
    assert by_id[bare]["data"] == {}
    assert last_event(canceled).details_json == {"operator": "mary", "reason": "not needed any more"}
    assert last_event(completed).details_json == {
        "operator": "mary",
        "reason": "phoned the bank",
        "result": {"booked": "by hand"},
    }


def test_edit_sends_it_again_with_other_data_and_keeps_the_data_before_in_the_audit() -> None:
    command_id = troubled(amount="a lot")
    ops.operator_edit("orders", command_id, {"amount": 5}, operator="mary", reason="a typing error")
    edit, retry = audit_trail("orders", command_id)[-2:]
    assert (edit.event_type, retry.event_type) == ("OPERATOR_EDIT", "OPERATOR_RETRY")
    assert edit.details_json == {
        "operator": "mary",
        "reason": "a typing error",
        "data_before": {"amount": "a lot"},
        "data": {"amount": 5},
    }
    before = reload(command_id)
    [received] = BUS.receive("orders", qty=1, vt=30)
    assert received.command.command_id == command_id
    assert received.command.data == {"amount": 5}
    assert received.command.correlation_id == before.correlation_id
    assert received.command.created_at == before.created_at
    assert ops.get_payload("orders", command_id) == {"amount": 5}


def test_after_an_edit_duplicates_are_still_compared_with_what_was_sent_first() -> None:
    command_id = troubled(amount="a lot")
    ops.operator_edit("orders", command_id, {"amount": 5})
    send_command("orders", "PlaceOrder", command_id, {"amount": "a lot"})
    with pytest.raises(DuplicateCommandError):
        send_command("orders", "PlaceOrder", command_id, {"amount": 5})
    assert len(BUS.receive("orders", qty=10, vt=30)) == 1


def test_an_edited_command_that_fails_again_is_retried_as_edited() -> None:
    command_id = troubled(amount="a lot")
    ops.operator_edit("orders", command_id, {"amount": 5})
    [received] = BUS.receive("orders", qty=1, vt=30)
    BUS.fail("orders", [Failure(received.lease, ErrorInfo("Broken", "AGAIN", ""))])
    ops.operator_edit("orders", command_id, {"amount": 6})
    edits = [event.details_json for event in audit_trail("orders", command_id) if event.event_type == "OPERATOR_EDIT"]
    assert edits[1] is not None
    assert edits[1]["data_before"] == {"amount": 5}
    [received] = BUS.receive("orders", qty=1, vt=30)
    BUS.fail("orders", [Failure(received.lease, ErrorInfo("Broken", "AGAIN", ""))])
    ops.operator_retry("orders", command_id)
    [received] = BUS.receive("orders", qty=1, vt=30)
    assert received.command.data == {"amount": 6}


def test_an_edit_reaches_the_payload_archive_and_needs_no_archived_message() -> None:
    Domain.objects.filter(name="orders").update(archive_payloads=True)
    command_id = troubled(amount="a lot")
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM pgmq.a_orders__commands")
    assert ops.get_payload("orders", command_id) == {"amount": "a lot"}
    PayloadArchive.objects.all().delete()
    assert ops.get_payload("orders", command_id) is None
    with pytest.raises(CommandRefusedError, match="its payload is no longer in the archive"):
        ops.operator_retry("orders", command_id)
    PayloadArchive.objects.create(domain="orders", command_id=command_id, payload_json={"amount": "a lot"})
    ops.operator_edit("orders", command_id, {"amount": 5})
    assert PayloadArchive.objects.get().payload_json == {"amount": 5}
    assert last_event(command_id).event_type == "OPERATOR_RETRY"


def test_the_payload_can_be_read_while_a_command_lives_and_not_after_it_was_completed() -> None:
    command_id = send(n=1)
    assert ops.get_payload("orders", command_id) == {"n": 1}
    [received] = BUS.receive("orders", qty=1, vt=30)
    assert ops.get_payload("orders", command_id) == {"n": 1}
    BUS.fail("orders", [Failure(received.lease, ErrorInfo("Broken", "NEVER", ""))])
    assert ops.get_payload("orders", command_id) == {"n": 1}
    ops.operator_cancel("orders", command_id, "no")
    assert ops.get_payload("orders", command_id) == {"n": 1}
    assert ops.get_payload("orders", uuid4()) is None


def everything() -> Any:
    rows = list(Command.objects.order_by("id").values())
    lengths = [PgmqClient().metrics(f"orders__{queue}").queue_length for queue in ("commands", "replies")]
    return rows, Audit.objects.count(), lengths


@pytest.mark.parametrize(
    "data", [None, [], "text", {"n": float("nan")}, {"n": "\x00"}, {1: 2}], ids=lambda data: repr(data)
)
def test_new_data_that_cannot_be_sent_are_refused_and_nothing_changes(data: Any) -> None:
    good, bad = troubled(), troubled()
    before = everything()
    with pytest.raises(InvalidCommandError, match=str(bad)):
        ops.operator_edit_many("orders", {good: {"n": 1}, bad: data})
    assert everything() == before


def test_new_data_that_are_too_large_are_refused_alone() -> None:
    Domain.objects.filter(name="orders").update(max_payload_bytes=100)
    good, bad = troubled(), troubled()
    result = ops.operator_edit_many("orders", {good: {"n": 1}, bad: {"n": "x" * 200}})
    assert result.done == [good]
    assert result.refused == {bad: "its new data take more than the 100 bytes that the domain allows"}
    assert status(bad) == TSQ


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT commandbus.operator_edit('orders', ARRAY[%(id)s, %(id)s]::uuid[], ARRAY['{}', '{}']::jsonb[])",
        "SELECT commandbus.operator_edit('orders', ARRAY[%(id)s]::uuid[], ARRAY['{}', '{}']::jsonb[])",
        "SELECT commandbus.operator_edit('orders', ARRAY[%(id)s]::uuid[], ARRAY['[]']::jsonb[])",
        "SELECT commandbus.operator_edit('orders', ARRAY[%(id)s]::uuid[], NULL)",
        "SELECT commandbus.operator_cancel('orders', ARRAY[%(id)s]::uuid[], NULL)",
        "SELECT commandbus.operator_cancel('orders', ARRAY[%(id)s]::uuid[], '  ')",
    ],
)
def test_the_sql_twins_refuse_what_cannot_be_meant(sql: str) -> None:
    command_id = troubled()
    before = everything()
    with (
        pytest.raises(DatabaseError, match=r"cannot be used|needs a reason"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute(sql, {"id": command_id})
    assert everything() == before


def test_the_sql_twins_act_on_a_selection() -> None:
    ids = [troubled(code="A"), troubled(code="A"), troubled(code="B")]
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FILTER (WHERE done) FROM commandbus.operator_retry('orders', ARRAY("
            " SELECT command_id FROM command_bus_command WHERE domain = 'orders'"
            " AND rare_status = 'IN_TROUBLESHOOTING_QUEUE' AND last_error_code = 'A'), 'mary', 'psql')"
        )
        assert cursor.fetchone() == (2,)
        cursor.execute(
            "SELECT done, why FROM commandbus.operator_edit('orders', ARRAY[%s]::uuid[], ARRAY['{\"n\": 2}']::jsonb[])",
            [ids[2]],
        )
        assert cursor.fetchone() == (True, None)
    assert [status(one) for one in ids] == ["PENDING"] * 3


@pytest.mark.parametrize("reason", ["", "  ", None])
def test_a_cancel_needs_a_reason(reason: Any) -> None:
    command_id = troubled()
    with pytest.raises(InvalidCommandError, match="needs a reason"):
        ops.operator_cancel("orders", command_id, reason)
    assert status(command_id) == TSQ


def test_a_result_that_is_no_json_object_is_refused() -> None:
    command_id = troubled()
    with pytest.raises(InvalidCommandError, match="result_data"):
        ops.operator_complete("orders", command_id, ["done"])  # type: ignore[arg-type]
    assert status(command_id) == TSQ


ACTIONS: dict[str, Callable[[UUID], None]] = {
    "retry": lambda command_id: ops.operator_retry("orders", command_id),
    "edit": lambda command_id: ops.operator_edit("orders", command_id, {"n": 2}),
    "cancel": lambda command_id: ops.operator_cancel("orders", command_id, "no"),
    "complete": lambda command_id: ops.operator_complete("orders", command_id),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_what_does_not_wait_for_an_operator_is_left_alone_with_the_reason(action: str) -> None:
    command_id = send()
    before = everything()
    with pytest.raises(CommandRefusedError, match="its status is PENDING") as caught:
        ACTIONS[action](command_id)
    assert caught.value.command_id == command_id
    with pytest.raises(CommandRefusedError, match="there is no such command in domain orders"):
        ACTIONS[action](uuid4())
    with pytest.raises(InvalidCommandError, match="must be a UUID"):
        ACTIONS[action]("7")  # type: ignore[arg-type]
    assert everything() == before


def test_many_are_done_although_some_are_refused() -> None:
    first, second = troubled(), troubled()
    waiting, stranger = send(), uuid4()
    result = ops.operator_retry_many("orders", [first, waiting, stranger, second, first], operator="mary")
    assert result.done == [first, second]
    assert result.refused == {
        waiting: "its status is PENDING",
        stranger: "there is no such command in domain orders",
    }
    assert last_event(first).details_json["operator"] == "mary"


def test_a_filter_selects_what_matches_now() -> None:
    old = troubled("PlaceOrder", "A")
    Command.objects.filter(command_id=old).update(updated_at=timezone.now() - timedelta(days=2))
    new, other, mail = troubled("PlaceOrder", "A"), troubled("PlaceOrder", "B"), troubled("SendMail", "A")
    yesterday = timezone.now() - timedelta(days=1)

    def retried(which: TroubleshootingFilter) -> list[UUID]:
        with transaction.atomic():
            done = ops.operator_retry_many("orders", which).done
            transaction.set_rollback(True)
        return done

    assert retried(TroubleshootingFilter()) == [old, new, other, mail]
    assert retried(TroubleshootingFilter(type="PlaceOrder", error_code="A")) == [old, new]
    assert retried(TroubleshootingFilter(error_type="Broken", until=yesterday)) == [old]
    assert retried(TroubleshootingFilter(error_code="A", since=yesterday)) == [new, mail]
    assert ops.operator_cancel_many("orders", TroubleshootingFilter(error_code="B"), "no").done == [other]
    assert ops.operator_complete_many("orders", TroubleshootingFilter(type="SendMail"), {"n": 1}).done == [mail]
    assert status(old) == TSQ


def test_many_are_worked_in_chunks_with_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(troubleshooting, "CHUNK", 10)
    ids = many_troubled(25)
    seen: list[tuple[int, int]] = []
    result = ops.operator_retry_many("orders", ids, progress=lambda done, of: seen.append((done, of)))
    assert sorted(result.done) == sorted(ids)
    assert seen == [(10, 25), (20, 25), (25, 25)]


def test_an_operators_name_and_reason_are_stored_whatever_they_contain() -> None:
    command_id = troubled()
    ops.operator_retry("orders", command_id, operator="m\x00ary", reason="x" * 20_000)
    details = last_event(command_id).details_json
    assert details["operator"] == "m\N{REPLACEMENT CHARACTER}ary"
    assert "cut: 20000 characters" in details["reason"]
