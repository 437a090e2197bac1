from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, transaction
from django.test import override_settings

import commandbus
from commandbus import (
    CommandRefusedError,
    DuplicateCommandError,
    InvalidCommandError,
    NewCommand,
    RetryPolicy,
    Status,
    UnknownDomainError,
    UnknownQueueError,
    UnsupportedIsolationLevelError,
    api,
    asend_command,
    audit_trail,
    cancel_command,
    get_command,
    list_commands,
    send_command,
    send_commands,
)
from commandbus.handlers import Handler, HandlerRegistry
from commandbus.install import register_domains
from commandbus.messages import Failure, Finish
from commandbus.models import Audit, Command, Domain, PayloadArchive
from commandbus.pgmq import PgmqClient
from commandbus.transitions import PostgresTransitions
from tests.helpers import WAITING_SESSIONS, rows_read, send_many
from tests.shop.models import Order

BUS = PostgresTransitions("default")


def nothing_was_written() -> bool:
    queue = PgmqClient().metrics("orders__commands").queue_length
    return not Command.objects.exists() and not Audit.objects.exists() and queue == 0


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"domain": "nowhere"}, UnknownDomainError, "'nowhere' is not registered; known: orders, other, payments"),
        ({"command_id": "abc"}, InvalidCommandError, "command_id must be a UUID, not 'abc'"),
        ({"command_id": None}, InvalidCommandError, "command_id must be a UUID, not None"),
        ({"command_id": 7}, InvalidCommandError, "command_id must be a UUID, not 7"),
        ({"command_type": ""}, InvalidCommandError, "1 to 255 characters"),
        ({"command_type": "x" * 256}, InvalidCommandError, "1 to 255 characters"),
        ({"command_type": "a\x00b"}, InvalidCommandError, "has characters that cannot be stored"),
        ({"command_type": "\ud800"}, InvalidCommandError, "has characters that cannot be stored"),
        ({"domain": ["orders"]}, UnknownDomainError, "domain must be a name"),
        ({"command_type": None}, InvalidCommandError, "1 to 255 characters, not None"),
        ({"data": [1]}, InvalidCommandError, "must be a JSON object (a dict), not list"),
        ({"data": {"x": float("nan")}}, InvalidCommandError, "x is nan"),
        ({"data": {"x": [float("-inf")]}}, InvalidCommandError, "-inf"),
        ({"data": {"x": {1}}}, InvalidCommandError, "x is a set"),
        ({"data": {"x": "a\x00"}}, InvalidCommandError, "\\u0000"),
        ({"data": {"x": "y" * 2_000_000}}, InvalidCommandError, "more bytes than the limit of 1048576"),
        ({"reply_to": "nobody__replies"}, UnknownQueueError, "there is no reply queue 'nobody__replies'"),
        ({"reply_to": 7}, UnknownQueueError, "there is no reply queue 7"),
        ({"reply_to": "orders__commands"}, UnknownQueueError, "there is no reply queue 'orders__commands'"),
        (
            {"data": {"x": [1e-20] * 80_000}},
            InvalidCommandError,
            "more bytes than what PostgreSQL allows for its domain",
        ),
        ({"correlation_id": "x"}, InvalidCommandError, "correlation_id"),
        ({"delay": -1}, InvalidCommandError, "from 0 seconds to 100 years, not -1"),
        ({"delay": timedelta(seconds=-1)}, InvalidCommandError, "from 0 seconds to 100 years"),
        ({"delay": float("nan")}, InvalidCommandError, "delay must be seconds or a timedelta"),
        ({"delay": "soon"}, InvalidCommandError, "delay must be seconds or a timedelta, not 'soon'"),
        ({"delay": True}, InvalidCommandError, "delay must be seconds"),
        ({"delay": 1e12}, InvalidCommandError, "100 years"),
    ],
)
def test_bad_input_is_named_before_anything_is_written(
    wrong: dict[str, Any], error: type[Exception], words: str
) -> None:
    right: dict[str, Any] = {"domain": "orders", "command_type": "Ship", "command_id": uuid4(), "data": {}}
    with pytest.raises(error) as caught:
        send_command(**{**right, **wrong})
    assert words in str(caught.value)
    assert nothing_was_written()
    assert Order.objects.count() == 0  # the transaction is as usable as before


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("command_ids", "cannot be sent"),
        ("types", "cannot be sent"),
        ("data", "cannot be sent"),
        ("delay", "cannot be sent"),
        ("reply_to", "there is no reply queue 'nowhere'"),
        ("other_queue", "there is no reply queue 'orders__events'"),
    ],
)
def test_the_sql_function_checks_too(change: str, words: str) -> None:
    """For those who do not come through Python."""
    changes: dict[str, dict[str, Any]] = {
        "command_ids": {"command_ids": [None]},
        "types": {"types": [""]},
        "data": {"data": ["[]"]},
        "delay": {"delay": [-1.0]},
        "reply_to": {"reply_to": ["nowhere"]},
        "other_queue": {"reply_to": ["orders__events"]},
    }
    right = {"command_ids": [uuid4()], "types": ["Ship"], "data": ["{}"], "reply_to": None, "delay": None}
    with pytest.raises((InvalidCommandError, UnknownQueueError), match=words), transaction.atomic():
        BUS._call(
            "SELECT * FROM commandbus.send('orders', %(command_ids)s::uuid[], %(types)s::text[], %(data)s::jsonb[],"
            " %(reply_to)s::text[], NULL, %(delay)s::float8[])",
            {**right, **changes[change]},  # type: ignore[arg-type]
        )


@pytest.mark.django_db
def test_too_large_for_its_domain_is_an_answer_and_not_an_error() -> None:
    Domain.objects.filter(name="orders").update(max_payload_bytes=100)
    large, small = NewCommand("Ship", uuid4(), {"x": 200 * "y"}), NewCommand("Ship", uuid4(), {})
    assert BUS.send("orders", [large, small]) == {large.command_id: "TOO_LARGE"}
    assert nothing_was_written()


@pytest.mark.django_db(transaction=True)
def test_a_caller_that_manages_transactions_by_hand_can_send() -> None:
    transaction.set_autocommit(False)
    try:
        command_id = send_command("orders", "Ship", uuid4(), {})
        transaction.commit()
    finally:
        transaction.set_autocommit(True)
    assert get_command("orders", command_id) is not None


@pytest.mark.django_db
def test_ids_may_come_as_text_and_replies_go_where_the_sender_wants() -> None:
    command_id = uuid4()
    assert send_command("orders", "Ship", str(command_id), {}, reply_to="other.replies") == command_id  # type: ignore[arg-type]
    command = get_command("orders", command_id)
    assert command is not None
    assert command.reply_queue == "other__replies"
    assert command.correlation_id == command_id


@pytest.mark.django_db
def test_a_duplicate_inside_a_larger_transaction_leaves_it_usable() -> None:
    command_id = uuid4()
    with transaction.atomic():
        send_command("orders", "Ship", command_id, {"n": 1})
        Order.objects.create(number="before")
        send_command("orders", "Ship", command_id, {"n": 1})
        with pytest.raises(DuplicateCommandError) as caught:
            send_command("orders", "Ship", command_id, {"n": 2})
        Order.objects.create(number="after")
    assert str(command_id) in str(caught.value)
    assert caught.value.command_ids == [command_id]
    assert Order.objects.count() == 2
    assert [row.event_type for row in audit_trail("orders", command_id)] == ["SENT"]


@pytest.mark.django_db(transaction=True)
def test_a_rollback_after_a_send_leaves_no_trace() -> None:
    with transaction.atomic():
        send_command("orders", "Ship", uuid4(), {})
        transaction.set_rollback(True)
    assert nothing_was_written()


@pytest.mark.django_db
def test_a_duplicate_is_known_for_ever_by_its_first_content() -> None:
    command_id = uuid4()
    send_command("orders", "Ship", command_id, {"n": 1})
    [received] = BUS.receive("orders", qty=1, vt=30)
    BUS.finish("orders", [Finish(received.lease, Status.COMPLETED)])
    send_command("orders", "Ship", command_id, {"n": 1})
    with pytest.raises(DuplicateCommandError):
        send_command("orders", "Ship", command_id, {"n": 2})
    assert BUS.receive("orders", qty=1, vt=30) == []


@pytest.mark.django_db
def test_many_are_sent_all_or_none() -> None:
    taken = send_command("orders", "Ship", uuid4(), {"n": 0})
    many = [NewCommand("Ship", uuid4(), {"n": n}) for n in range(2500)]
    with pytest.raises(DuplicateCommandError):
        send_commands("orders", [*many, NewCommand("Ship", taken, {"n": "other"})])
    assert Command.objects.count() == 1
    with pytest.raises(InvalidCommandError, match="must be a UUID"):
        send_commands("orders", [*many, NewCommand("Ship", 7, {})])  # type: ignore[arg-type]
    assert Command.objects.count() == 1
    assert send_commands("orders", iter(many)) == [command.command_id for command in many]
    assert send_commands("orders", many) == [command.command_id for command in many]
    assert Command.objects.count() == 2501
    assert PgmqClient().metrics("orders__commands").queue_length == 2501
    assert send_commands("orders", []) == []


@pytest.mark.django_db
@pytest.mark.parametrize("unique_globally", [False, True])
def test_a_send_reads_no_command_but_its_own_however_many_there_are(unique_globally: bool) -> None:
    """Also with the plans that its session has kept since there was none."""
    Domain.objects.update(unique_globally=unique_globally)
    known = send_command("orders", "Ship", uuid4(), {})
    for _ in range(10):
        send_commands("orders", [NewCommand("Ship", command_id, {}) for command_id in (uuid4(), known)])
    send_many("orders", "Ship", 2000)
    send_many("other", "Ship", 2000)
    before = rows_read("command_bus_command")
    send_commands("orders", [NewCommand("Ship", command_id, {}) for command_id in (uuid4(), uuid4(), known)])
    assert rows_read("command_bus_command") - before <= 2  # once to see that not all are new, once to compare


@pytest.mark.django_db
@pytest.mark.parametrize("known", [{0}, {9}, {0, 1, 2}, {48, 49}, set(range(49)), set(range(50))])
@pytest.mark.parametrize("content", ["same", "other"])
def test_whichever_of_many_are_known_nothing_is_sent_twice(known: set[int], content: str) -> None:
    commands = [NewCommand("Ship", uuid4(), {"n": n}) for n in range(50)]
    BUS.send("orders", [commands[n] for n in sorted(known)])
    if content == "other":
        commands[max(known)] = commands[max(known)]._replace(data={"n": "other"})
        assert BUS.send("orders", commands) == {commands[max(known)].command_id: "CONFLICT"}
        expected = len(known)
    else:
        outcomes = ["DUPLICATE" if n in known else "SENT" for n in range(50)]
        assert BUS.send("orders", commands) == dict(zip([c.command_id for c in commands], outcomes, strict=True))
        expected = 50
    assert Command.objects.count() == Audit.objects.count() == expected
    assert PgmqClient().metrics("orders__commands").queue_length == expected


@pytest.mark.django_db
def test_a_session_that_writes_times_in_another_way_leases_for_the_same_time() -> None:
    send_command("orders", "Ship", uuid4(), {})
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL datestyle = 'SQL, DMY'")
        cursor.execute("SET LOCAL timezone = 'Asia/Kolkata'")  # IST, which PostgreSQL takes for Israel's
        assert len(BUS.receive("orders", qty=1, vt=30)) == 1
        cursor.execute("SELECT vt - clock_timestamp() BETWEEN '0' AND '30 seconds' FROM pgmq.q_orders__commands")
        assert cursor.fetchall() == [(True,)]


@pytest.mark.django_db
def test_commands_are_queued_in_the_order_in_which_they_are_given() -> None:
    ids = [uuid4() for _ in range(20)]
    known = send_command("orders", "Ship", uuid4(), {})
    send_commands("orders", [NewCommand("Ship", command_id, {}) for command_id in ids[:10]])
    send_commands("orders", [NewCommand("Ship", command_id, {}) for command_id in (known, *ids[10:])])
    received = BUS.receive("orders", qty=100, vt=30)
    assert [one.command.command_id for one in received] == [known, *ids]


@pytest.mark.django_db
def test_the_same_id_in_two_domains_is_two_commands_or_a_conflict_by_setting() -> None:
    command_id = uuid4()
    send_command("orders", "Ship", command_id, {})
    send_command("other", "Ship", command_id, {})
    Domain.objects.update(unique_globally=True)
    second = uuid4()
    send_command("orders", "Ship", second, {})
    send_command("orders", "Ship", second, {})
    with pytest.raises(DuplicateCommandError):
        send_command("other", "Ship", second, {})
    assert get_command("other", second) is None


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_an_isolation_level_that_we_do_not_support_is_a_clear_error(level: str) -> None:
    def send() -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            send_command("orders", "Ship", uuid4(), {})

    with pytest.raises(UnsupportedIsolationLevelError, match=f"this transaction runs in {level}"):
        send()
    assert nothing_was_written()


@pytest.mark.django_db(transaction=True)
def test_two_senders_of_one_id_at_once_send_it_once() -> None:
    """The second waits for the first to commit and then finds its twin: same content, or a conflict."""
    same, other = uuid4(), uuid4()
    first_has_sent, outcomes = threading.Event(), {}

    def second() -> None:
        try:
            first_has_sent.wait(10)
            outcomes["same"] = BUS.send("orders", [NewCommand("Ship", same, {"n": 1})])
            innocent = NewCommand("Ship", uuid4(), {})
            outcomes["other"] = BUS.send("orders", [NewCommand("Ship", other, {"n": 2}), innocent])
        finally:
            connection.close()

    thread = threading.Thread(target=second)
    thread.start()
    with transaction.atomic():
        BUS.send("orders", [NewCommand("Ship", same, {"n": 1}), NewCommand("Ship", other, {"n": 1})])
        first_has_sent.set()
        wait_for_a_blocked_backend()
    thread.join(10)
    assert outcomes == {"same": {same: "DUPLICATE"}, "other": {other: "CONFLICT"}}
    assert Command.objects.count() == 2
    assert Audit.objects.count() == 2
    assert PgmqClient().metrics("orders__commands").queue_length == 2


def wait_for_a_blocked_backend() -> None:
    with connection.cursor() as cursor:
        for _ in range(500):
            cursor.execute(WAITING_SESSIONS)
            if cursor.fetchone()[0]:
                return
            cursor.execute("SELECT pg_sleep(0.01)")
    raise AssertionError("nobody waits")


@pytest.mark.django_db(transaction=True)
def test_a_conflict_that_is_found_late_takes_the_whole_call_back() -> None:
    """The twin commits between our look and our insert: the race that ON CONFLICT decides."""
    contested = uuid4()
    started, outcome = threading.Event(), {}

    def second() -> None:
        try:
            started.wait(10)
            commands = [NewCommand("Ship", contested, {"n": 2}), NewCommand("Ship", uuid4(), {})]
            outcome.update(BUS.send("orders", commands))
        finally:
            connection.close()

    thread = threading.Thread(target=second)
    thread.start()
    with transaction.atomic():
        BUS.send("orders", [NewCommand("Ship", contested, {"n": 1})])
        started.set()
        wait_for_a_blocked_backend()
    thread.join(10)
    assert outcome == {contested: "CONFLICT"}
    assert Command.objects.count() == 1
    assert Audit.objects.count() == 1
    assert PgmqClient().metrics("orders__commands").queue_length == 1


@pytest.mark.django_db(transaction=True)
def test_times_follow_the_numbers_also_of_a_sender_that_had_to_wait() -> None:
    """What was sent in a range of time is looked for by number."""
    first, contested, last = sorted(uuid4() for _ in range(3))
    started = threading.Event()

    def second() -> None:
        try:
            started.wait(10)
            BUS.send("orders", [NewCommand("Ship", one, {}) for one in (first, contested, last)])
        finally:
            connection.close()

    thread = threading.Thread(target=second)
    thread.start()
    with transaction.atomic():
        BUS.send("orders", [NewCommand("Ship", contested, {})])
        started.set()
        wait_for_a_blocked_backend()
        BUS.send("orders", [NewCommand("Ship", uuid4(), {})])
    thread.join(10)
    rows = list(Command.objects.order_by("id").values_list("created_at", "updated_at"))
    assert len(rows) == 4
    assert rows == sorted(rows)
    assert all(created <= updated for created, updated in rows)
    assert set(Audit.objects.values_list("ts", flat=True)) == {created for created, _ in rows}


@pytest.mark.django_db(transaction=True)
def test_asend_commits_by_itself() -> None:
    command_id = uuid4()
    assert async_to_sync(asend_command)("orders", "Ship", command_id, {}) == command_id
    assert get_command("orders", command_id) is not None


@pytest.mark.django_db
def test_the_policy_of_the_handler_is_stored_with_the_command(commandbus_handlers: HandlerRegistry) -> None:
    def ship(command: Any, context: Any) -> None: ...

    commandbus_handlers.register(Handler("orders", "Ship", ship, RetryPolicy(max_attempts=7)))
    known = send_command("orders", "Ship", uuid4(), {})
    unknown = send_command("orders", "Unheard", uuid4(), {})
    register_domains("default")
    registered = uuid4()
    BUS.send("orders", [NewCommand("Ship", registered, {})])  # as a sender without the handlers would
    attempts = dict(Command.objects.values_list("command_id", "max_attempts"))
    assert attempts == {known: 7, unknown: 3, registered: 7}


@pytest.mark.django_db
def test_payloads_are_kept_where_the_setting_asks_for_it() -> None:
    with override_settings(COMMANDBUS={"DOMAINS": ["orders"], "PAYLOAD_ARCHIVE": True, "REPLY_QUEUE": "all_replies"}):
        register_domains("default")
        command_id = send_command("orders", "Ship", uuid4(), {"keep": "me"})
    assert PayloadArchive.objects.get().payload_json == {"keep": "me"}
    command = get_command("orders", command_id)
    assert command is not None
    assert command.reply_queue == "all_replies"


@pytest.mark.django_db
def test_cancel_says_why_it_cannot() -> None:
    waiting, running = send_command("orders", "Ship", uuid4(), {}, delay=timedelta(minutes=1)), uuid4()
    cancel_command("orders", waiting, "typo \x00 \ud800")
    with pytest.raises(CommandRefusedError, match="its status is CANCELED"):
        cancel_command("orders", waiting)
    send_command("orders", "Ship", running, {})
    BUS.receive("orders", qty=1, vt=30)
    with pytest.raises(CommandRefusedError, match="a worker has leased it until"):
        cancel_command("orders", running)
    with pytest.raises(CommandRefusedError, match="no such command"):
        cancel_command("orders", uuid4())
    with pytest.raises(UnknownDomainError):
        cancel_command("nowhere", uuid4())


@pytest.mark.django_db
def test_commands_are_listed_newest_first_by_status_and_type() -> None:
    first = send_command("orders", "Ship", uuid4(), {})
    second = send_command("orders", "Return", uuid4(), {})
    third = send_command("orders", "Ship", uuid4(), {})
    send_command("other", "Ship", uuid4(), {})
    [received] = BUS.receive("orders", qty=1, vt=30)
    error = commandbus.messages.ErrorInfo("T", "C", "m")
    BUS.fail("orders", [Failure(received.lease, error)])

    def ids(**filters: Any) -> list[UUID]:
        return [command.command_id for command in list_commands("orders", **filters)]

    assert ids() == [third, second, first]
    assert ids(command_type="Ship") == [third, first]
    assert ids(status="IN_TROUBLESHOOTING_QUEUE") == [first]
    assert ids(status=Status.PENDING, command_type="Ship") == [third]
    assert ids(limit=1, offset=1) == [second]
    assert audit_trail("orders", uuid4()) == []
    with pytest.raises(ValueError, match="NONSENSE"):
        ids(status="NONSENSE")


@pytest.mark.django_db
def test_a_domain_that_another_process_registers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_known_domains", {"default": {"orders"}})
    send_command("other", "Ship", uuid4(), {})
