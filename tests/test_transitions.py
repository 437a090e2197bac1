"""Every cell of the transition table, on PostgreSQL, in both modes of MARK_IN_PROGRESS."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction

from commandbus.api import audit_trail, get_command
from commandbus.messages import ErrorInfo, Failure, Finish, Lease, NewCommand, Status
from commandbus.models import Audit, Command, Domain, PayloadArchive
from commandbus.pgmq import PgmqClient
from commandbus.transitions import PostgresTransitions

pytestmark = pytest.mark.django_db

BUS = PostgresTransitions("default")
ERROR = ErrorInfo("Boom", "BOOM", "it went wrong")
LEASED = "leased"  # shown as IN_PROGRESS or PENDING, by MARK_IN_PROGRESS


@pytest.fixture(params=[True, False], ids=["marked", "unmarked"], autouse=True)
def mark_in_progress(request: pytest.FixtureRequest, db: None) -> bool:
    Domain.objects.filter(name="orders").update(mark_in_progress=request.param)
    return bool(request.param)


def bring_to(state: str) -> Lease:
    """A command in the given state, with the token of its newest lease (or one that never was)."""
    command_id = uuid4()
    BUS.send("orders", [NewCommand("Ship", command_id, {"n": 1})])
    if state == "PENDING":
        command = get_command("orders", command_id)
        assert command is not None
        return Lease(command_id, command.msg_id or 0, 1)
    [received] = BUS.receive("orders", qty=1, vt=30)
    if state in ("COMPLETED", "FAILED", "CANCELED"):
        BUS.finish("orders", [Finish(received.lease, Status(state))])
    elif state == "IN_TROUBLESHOOTING_QUEUE":
        BUS.fail("orders", [Failure(received.lease, ERROR)])
    else:
        assert state == LEASED
    return received.lease


def everything() -> Any:
    """All that a refused transition must not have changed."""
    rows = [dict(row) for row in Command.objects.order_by("id").values()]
    queues = [PgmqClient().metrics(f"orders__{queue}").queue_length for queue in ("commands", "replies")]
    return rows, Audit.objects.count(), queues


Action = Callable[[Lease], Any]
ACTIONS: dict[str, Action] = {
    "receive": lambda lease: BUS.receive("orders", qty=10, vt=30),
    "complete": lambda lease: BUS.finish("orders", [Finish(lease, Status.COMPLETED, {"x": 1})]),
    "fail by rule": lambda lease: BUS.finish("orders", [Finish(lease, Status.FAILED, error=ERROR)]),
    "cancel by handler": lambda lease: BUS.finish("orders", [Finish(lease, Status.CANCELED, error=ERROR)]),
    "retry": lambda lease: BUS.fail("orders", [Failure(lease, ERROR, 5)]),
    "troubleshoot": lambda lease: BUS.fail("orders", [Failure(lease, ERROR)]),
    "release": lambda lease: BUS.release("orders", [lease]),
    "extend": lambda lease: BUS.extend("orders", [lease], 60),
    "cancel": lambda lease: [a for a in BUS.cancel("orders", [lease.command_id]) if a.done],
    "operator retry": lambda lease: [a for a in BUS.operator_retry("orders", [lease.command_id], "op") if a.done],
    "operator edit": lambda lease: [a for a in BUS.operator_edit("orders", {lease.command_id: {"n": 2}}) if a.done],
    "operator cancel": lambda lease: [a for a in BUS.operator_cancel("orders", [lease.command_id], "no") if a.done],
    "operator complete": lambda lease: [a for a in BUS.operator_complete("orders", [lease.command_id]) if a.done],
}
TSQ = "IN_TROUBLESHOOTING_QUEUE"
ALLOWED: dict[tuple[str, str], tuple[str, str | None]] = {
    ("PENDING", "receive"): (LEASED, "RECEIVED"),
    ("PENDING", "cancel"): ("CANCELED", "CANCELED"),
    (LEASED, "complete"): ("COMPLETED", "COMPLETED"),
    (LEASED, "fail by rule"): ("FAILED", "FAILED"),
    (LEASED, "cancel by handler"): ("CANCELED", "CANCELED"),
    (LEASED, "retry"): ("PENDING", "RETRY_SCHEDULED"),
    (LEASED, "troubleshoot"): (TSQ, "MOVED_TO_TROUBLESHOOTING_QUEUE"),
    (LEASED, "release"): ("PENDING", "RELEASED"),
    (LEASED, "extend"): (LEASED, None),
    (TSQ, "operator retry"): ("PENDING", "OPERATOR_RETRY"),
    (TSQ, "operator edit"): ("PENDING", "OPERATOR_EDIT OPERATOR_RETRY"),
    (TSQ, "operator cancel"): ("CANCELED", "OPERATOR_CANCEL"),
    (TSQ, "operator complete"): ("COMPLETED", "OPERATOR_COMPLETE"),
}
STATES = ["PENDING", LEASED, "COMPLETED", "FAILED", "CANCELED", TSQ]


@pytest.mark.parametrize(("state", "action"), sorted(ALLOWED))
def test_an_allowed_transition_changes_the_status_and_writes_its_audit_event(
    state: str, action: str, mark_in_progress: bool
) -> None:
    lease = bring_to(state)
    before = len(audit_trail("orders", lease.command_id))
    replies_before = PgmqClient().metrics("orders__replies").queue_length
    assert ACTIONS[action](lease)
    expected, written = ALLOWED[(state, action)]
    command = get_command("orders", lease.command_id)
    assert command is not None
    if expected == LEASED:
        assert command.lease_read_ct is not None
        assert command.status == ("IN_PROGRESS" if mark_in_progress else "PENDING")
    else:
        assert command.status == expected
        assert command.lease_read_ct is None
    events = [row.event_type for row in audit_trail("orders", lease.command_id)][before:]
    assert events == (written or "").split()
    replies = PgmqClient().metrics("orders__replies").queue_length - replies_before
    assert replies == (1 if expected in ("COMPLETED", "FAILED", "CANCELED") else 0)
    assert (command.reply is not None) == (replies == 1)


@pytest.mark.parametrize(
    ("state", "action"),
    [(state, action) for state in STATES for action in ACTIONS if (state, action) not in ALLOWED],
)
def test_every_other_transition_is_refused_and_changes_nothing(state: str, action: str) -> None:
    lease = bring_to(state)
    before = everything()
    assert not ACTIONS[action](lease)
    assert everything() == before


@pytest.mark.parametrize("status", ["PENDING", "IN_PROGRESS", TSQ, "NONSENSE"])
def test_finish_takes_only_ends(status: str) -> None:
    lease = bring_to(LEASED)
    with pytest.raises(DatabaseError, match="cannot be ended"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            "SELECT commandbus.finish('orders', %s::uuid[], %s::bigint[], %s::int[], %s::text[])",
            [[lease.command_id], [lease.msg_id], [lease.read_ct], [status]],
        )


@pytest.mark.parametrize(
    "change",
    [
        {"status": "NONSENSE"},
        {"status": "IN_PROGRESS", "lease_read_ct": None, "lease_expires_at": None},
        {"answer": {"early": True}},
        {"attempts": -1},
        {"lease_read_ct": 1},
        {"lease_expires_at": datetime.now(UTC)},
        {"status": "COMPLETED", "lease_read_ct": 1, "lease_expires_at": datetime.now(UTC)},
        {"max_attempts": 0},
    ],
)
def test_the_table_refuses_rows_that_cannot_be(change: dict[str, Any]) -> None:
    lease = bring_to("PENDING")
    with pytest.raises(IntegrityError), transaction.atomic():
        Command.objects.filter(command_id=lease.command_id).update(**change)


def test_the_stored_max_attempts_is_what_counts() -> None:
    command_id = uuid4()
    BUS.send("orders", [NewCommand("Ship", command_id, {})], [1])
    [received] = BUS.receive("orders", qty=1, vt=30)
    assert BUS.fail("orders", [Failure(received.lease, ERROR, 5)]) == {command_id: Status.IN_TROUBLESHOOTING_QUEUE}
    [moved] = [row for row in audit_trail("orders", command_id) if row.event_type.startswith("MOVED")]
    assert moved.details_json is not None
    assert moved.details_json["reason"] == "EXHAUSTED"
    assert moved.details_json["error"]["message"] == "it went wrong"


def test_operator_retry_without_a_reset_adds_one_attempt() -> None:
    Domain.objects.filter(name="orders").update(reset_attempts=False)
    lease = bring_to(TSQ)
    BUS.operator_retry("orders", [lease.command_id], "op")
    command = get_command("orders", lease.command_id)
    assert command is not None
    assert (command.attempts, command.max_attempts) == (1, 3)
    for _ in range(2):
        [received] = BUS.receive("orders", qty=1, vt=30)
        BUS.fail("orders", [Failure(received.lease, ERROR, 0)])
    BUS.operator_retry("orders", [lease.command_id], "op")
    command.refresh_from_db()
    assert (command.attempts, command.max_attempts) == (3, 4)


def test_operator_retry_finds_the_payload_in_the_payload_archive_or_says_that_it_is_gone() -> None:
    Domain.objects.filter(name="orders").update(archive_payloads=True)
    kept, gone = bring_to(TSQ), bring_to(TSQ)
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE pgmq.a_orders__commands")
    PayloadArchive.objects.filter(command_id=gone.command_id).delete()
    answers = {a.command_id: a for a in BUS.operator_retry("orders", [kept.command_id, gone.command_id], "op")}
    assert answers[kept.command_id].done
    assert answers[gone.command_id].why == "its payload is no longer in the archive"
    [received] = BUS.receive("orders", qty=5, vt=30)
    assert received.command.command_id == kept.command_id
    assert received.command.data == {"n": 1}


def test_one_call_takes_thousands() -> None:
    ids = [uuid4() for _ in range(3000)]
    outcomes = BUS.send("orders", [NewCommand("Ship", i, {"n": 1}, delay=n % 3) for n, i in enumerate(ids)])
    assert set(outcomes.values()) == {"SENT"}
    received: list[Any] = []
    PgmqClient().set_vt("orders__commands", [c.msg_id or 0 for c in Command.objects.all()], 0)
    while more := BUS.receive("orders", qty=1000, vt=30):
        received += more
    assert {r.command.command_id for r in received} == set(ids)
    third = len(ids) // 3
    finishes = [Finish(r.lease, Status.COMPLETED, {"n": n}) for n, r in enumerate(received[:third])]
    assert len(BUS.finish("orders", finishes)) == third
    failures = [Failure(r.lease, ERROR, float(n % 7)) for n, r in enumerate(received[third : 2 * third])]
    assert len(BUS.fail("orders", failures)) == third
    assert len(BUS.release("orders", [r.lease for r in received[2 * third :]])) == third


def test_error_texts_of_any_length_and_encoding_are_stored() -> None:
    lease = bring_to(LEASED)
    nasty = ErrorInfo("T" * 999, "C\x00\ud800", "ü\x00" * 20_000, {"a": "\x00"}, "trace\x00" * 9_999)
    assert BUS.fail("orders", [Failure(lease, nasty)])
    command = get_command("orders", lease.command_id)
    assert command is not None
    assert command.last_error_msg is not None
    assert command.last_error_msg.endswith("… [cut: 40000 characters]")


@pytest.mark.parametrize("call", ["fail", "finish"])
def test_error_texts_from_sql_are_cut_too(call: str) -> None:
    lease = bring_to(LEASED)
    calls = {
        "fail": "SELECT commandbus.fail('orders', %s::uuid[], %s::bigint[], %s::int[], %s::jsonb[])",
        "finish": "SELECT commandbus.finish('orders', %s::uuid[], %s::bigint[], %s::int[], ARRAY['FAILED'],"
        " errors => %s::jsonb[])",
    }
    with connection.cursor() as cursor:
        cursor.execute(
            calls[call],
            [[lease.command_id], [lease.msg_id], [lease.read_ct], [json.dumps({"code": "C", "message": "x" * 30_000})]],
        )
    command = get_command("orders", lease.command_id)
    assert command is not None
    assert command.last_error_msg == "x" * 9900 + "… [cut: 30000 characters]"
    assert command.last_error_code == "C"


def test_the_same_from_psql() -> None:
    """The functions as a person at a prompt would call them, with their defaults."""
    command_id: UUID = uuid4()
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT outcome FROM commandbus.send('orders', ARRAY[%s]::uuid[], ARRAY['Ship'], ARRAY['{}'::jsonb])",
            [command_id],
        )
        assert cursor.fetchall() == [("SENT",)]
        cursor.execute("SELECT command_id, msg_id, read_ct FROM commandbus.receive('orders', 1, 30)")
        [(received_id, msg_id, read_ct)] = cursor.fetchall()
        assert received_id == command_id
        cursor.execute(
            "SELECT commandbus.finish('orders', ARRAY[%s]::uuid[], ARRAY[%s]::bigint[], ARRAY[%s], ARRAY['COMPLETED'])",
            [command_id, msg_id, read_ct],
        )
        assert cursor.fetchall() == [(command_id,)]
