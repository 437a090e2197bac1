"""Handlers, leases, locks and connections that misbehave."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection, connections, transaction
from django.db.backends.signals import connection_created

from commandbus import (
    CommandRefusedError,
    NewCommand,
    RetryPolicy,
    audit_trail,
    cancel_command,
    send_command,
    send_commands,
)
from commandbus.exceptions import LeaseLostError
from commandbus.models import Command, UnreadableMessage
from commandbus.pgmq import PgmqClient
from commandbus.testing.time import advance
from commandbus.worker.options import WorkerOptions
from commandbus.worker.worker import Worker
from tests.helpers import (
    registry_with,
    reload,
    replies,
    running_worker,
    send,
    status,
    wait_until,
)
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


class Unspeakable(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), Unspeakable(), asyncio.CancelledError()])
@pytest.mark.parametrize("transactional", [True, False])
def test_nothing_that_a_handler_raises_ends_a_thread_of_the_worker(error: BaseException, transactional: bool) -> None:
    def fail(command: Any, context: Any) -> None:
        if command.data["fail"]:
            raise error

    handlers = registry_with(fail, transactional=transactional, retry_policy=RetryPolicy(backoff=(0,)))
    send_commands("orders", [NewCommand("Test", uuid4(), {"fail": n < 5}) for n in range(10)])
    with running_worker(handlers):
        wait_until(lambda: Command.objects.filter(status="IN_TROUBLESHOOTING_QUEUE").count() == 5)
        wait_until(lambda: Command.objects.filter(status="COMPLETED").count() == 5)


@pytest.mark.parametrize("data", ['{"n": 1' + "0" * 5000 + "}", '{"n": ' + "[" * 2000 + "]" * 2000 + "}"])
def test_data_that_python_cannot_hold_harms_no_neighbour(data: str) -> None:
    """PostgreSQL can, so it can be sent from SQL."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT * FROM commandbus.send('orders', ARRAY[%s]::uuid[], ARRAY['SendMail'], ARRAY[%s]::jsonb[])",
            [broken := uuid4(), data],
        )
    fine = send("SendMail")
    with running_worker():
        wait_until(lambda: status(broken) == "IN_TROUBLESHOOTING_QUEUE")
        wait_until(lambda: status(fine) == "COMPLETED")
    assert reload(broken).last_error_code == "INVALID_DATA"


def test_an_end_that_the_database_refuses_goes_to_an_operator() -> None:
    PgmqClient().create_queue("gone")
    command_id = send_command("orders", "SendMail", uuid4(), {}, reply_to="gone")
    PgmqClient().drop_queue("gone")
    with running_worker():
        wait_until(lambda: status(command_id) == "IN_TROUBLESHOOTING_QUEUE")
    assert "does not exist" in (reload(command_id).last_error_msg or "")


def test_a_callback_that_fails_after_the_commit_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail_later(command: Any, context: Any) -> None:
        transaction.on_commit(lambda: 1 / 0)

    command_id = send_command("orders", "Test", uuid4(), {})
    with running_worker(registry_with(fail_later)):
        wait_until(lambda: "after_commit.raised" in caplog.text)
    assert status(command_id) == "COMPLETED"
    assert "ZeroDivisionError" in caplog.text
    assert "lease.lost" not in caplog.text


def test_a_command_whose_lease_may_end_before_it_starts_is_given_back() -> None:
    with running_worker() as worker:
        worker._leases.vt = -1  # so that no lease is sure
        too_late = send("SendMail")
        wait_until(lambda: "RELEASED" in [row.event_type for row in audit_trail("orders", too_late)])
        worker._leases.vt = 30
        wait_until(lambda: status(too_late) == "COMPLETED")
    assert reload(too_late).attempts == 1


def test_a_late_worker_loses_quietly(caplog: pytest.LogCaptureFixture) -> None:
    """Its lease ran out while the handler ran, and another worker took the command."""
    inside, go_on = threading.Event(), threading.Event()

    def slow(command: Any, context: Any) -> None:
        Order.objects.create(number="effect")
        if context.node == "late":
            inside.set()
            go_on.wait(30)

    handlers = registry_with(slow)
    command_id = send_command("orders", "Test", uuid4(), {})
    with running_worker(handlers, name="late", concurrency=1):
        wait_until(inside.is_set)
        advance("orders", 100)
        with running_worker(handlers, name="owner"):
            wait_until(lambda: status(command_id) == "COMPLETED")
        with caplog.at_level(logging.WARNING, "commandbus.worker"):
            go_on.set()
            wait_until(lambda: "lease.lost" in caplog.text)
    assert Order.objects.count() == 1
    assert len(replies()) == 1


def test_a_late_worker_without_a_transaction_loses_quietly_too(caplog: pytest.LogCaptureFixture) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(command: Any, context: Any) -> None:
        if context.node == "late":
            inside.set()
            go_on.wait(30)
            if command.data:
                raise RuntimeError("and it fails")

    handlers = registry_with(slow, transactional=False)
    for data in ({}, {"fail": True}):
        inside.clear()
        go_on.clear()
        command_id = send_command("orders", "Test", uuid4(), data)
        with running_worker(handlers, name="late", concurrency=1):
            wait_until(inside.is_set)
            advance("orders", 100)
            with running_worker(handlers, name="owner"):
                wait_until(lambda c=command_id: status(c) == "COMPLETED")  # type: ignore[misc]
            caplog.clear()
            with caplog.at_level(logging.WARNING, "commandbus.worker"):
                go_on.set()
                wait_until(lambda: "lease.lost" in caplog.text)
        assert status(command_id) == "COMPLETED"
    assert len(replies()) == 2


def test_a_handler_can_extend_its_lease_and_others_see_it_at_once() -> None:
    extended, go_on = threading.Event(), threading.Event()

    def extend(command: Any, context: Any) -> None:
        context.extend_lease(1000)
        extended.set()
        go_on.wait(30)

    command_id = send_command("orders", "Test", uuid4(), {})
    with running_worker(registry_with(extend)):
        wait_until(extended.is_set)
        before = reload(command_id).lease_expires_at
        advance("orders", 60)
        assert PgmqClient().metrics("orders__commands").queue_visible_length == 0
        go_on.set()
        wait_until(lambda: status(command_id) == "COMPLETED")
    assert before is not None


def test_extending_a_lost_lease_tells_the_handler_to_stop() -> None:
    told: list[Exception] = []
    inside, go_on = threading.Event(), threading.Event()

    def extend(command: Any, context: Any) -> None:
        if context.node != "late":
            return
        inside.set()
        go_on.wait(30)
        try:
            context.extend_lease(10)
        except LeaseLostError as error:
            told.append(error)
            raise

    handlers = registry_with(extend)
    command_id = send_command("orders", "Test", uuid4(), {})
    with running_worker(handlers, name="late", concurrency=1):
        wait_until(inside.is_set)
        advance("orders", 100)
        with running_worker(handlers, name="owner"):
            wait_until(lambda: status(command_id) == "COMPLETED")
        go_on.set()
        wait_until(lambda: told)


def test_data_that_is_no_object_goes_to_troubleshooting_and_harms_no_neighbour() -> None:
    """It cannot be sent so; somebody has changed the message in the queue."""
    broken, fine = send("ImportOrders"), send("ImportOrders")
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE pgmq.q_orders__commands SET message = jsonb_set(message, '{data}', '[1]') WHERE msg_id = %s",
            [reload(broken).msg_id],
        )
    with running_worker():
        wait_until(lambda: status(broken) == "IN_TROUBLESHOOTING_QUEUE")
        wait_until(lambda: status(fine) == "COMPLETED")
    assert reload(broken).last_error_code == "INVALID_DATA"


def test_unreadable_messages_are_recorded() -> None:
    PgmqClient().send("orders__commands", {"hello": "world"})
    PgmqClient().send("orders__commands", {"command_id": str(uuid4())})
    command_id = send("SendMail")
    with running_worker():
        wait_until(lambda: status(command_id) == "COMPLETED")
    first, second = UnreadableMessage.objects.order_by("msg_id")
    assert first.reason == "the message has no command_id that is a UUID"
    assert "there is no command" in second.reason
    assert PgmqClient().archived("orders__commands", first.msg_id) == {"hello": "world"}


def test_a_lost_connection_is_not_the_handlers_fault() -> None:
    attempts = []

    def lose(command: Any, context: Any) -> None:
        attempts.append(context.attempt)
        if len(attempts) == 1:
            with connection.cursor() as cursor, connections["default"].copy().cursor() as other:
                cursor.execute("SELECT pg_backend_pid()")
                other.execute("SELECT pg_terminate_backend(%s, 5000)", [cursor.fetchone()[0]])
                other.db.close()
        Order.objects.create(number="effect")

    command_id = send_command("orders", "Test", uuid4(), {})
    with running_worker(registry_with(lose), concurrency=1):
        wait_until(lambda: status(command_id) == "COMPLETED")
    assert attempts == [1, 1]
    assert Order.objects.count() == 1


def test_a_command_that_loses_its_connection_again_and_again_is_at_fault() -> None:
    def lose(command: Any, context: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    command_id = send_command("orders", "Test", uuid4(), {})
    with running_worker(registry_with(lose, retry_policy=RetryPolicy(backoff=(0,)))):
        wait_until(lambda: [row.event_type for row in audit_trail("orders", command_id)].count("RELEASED") == 2)
        wait_until(lambda: "RETRY_SCHEDULED" in [row.event_type for row in audit_trail("orders", command_id)])


@pytest.mark.parametrize("transactional", [True, False])
def test_a_handler_that_closes_its_own_connection_has_not_lost_it(transactional: bool) -> None:
    def close(command: Any, context: Any) -> None:
        connections.close_all()
        Order.objects.raw("SELECT nonsense")[0]

    command_id = send_command("orders", "Test", uuid4(), {})
    handlers = registry_with(close, retry_policy=RetryPolicy(backoff=(0,)), transactional=transactional)
    with running_worker(handlers):
        wait_until(lambda: status(command_id) == "IN_TROUBLESHOOTING_QUEUE")
    assert reload(command_id).attempts == 3


def test_a_transaction_that_idles_too_long_is_the_handlers_fault() -> None:
    def idle(command: Any, context: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL idle_in_transaction_session_timeout = '20ms'")
        time.sleep(0.1)
        Order.objects.create(number="too late")

    command_id = send_command("orders", "Test", uuid4(), {})
    with running_worker(registry_with(idle, retry_policy=RetryPolicy(backoff=(0,)))):
        wait_until(lambda: status(command_id) == "IN_TROUBLESHOOTING_QUEUE")


def test_a_refused_cancel_does_not_hold_up_the_worker() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait(command: Any, context: Any) -> None:
        inside.set()
        go_on.wait(30)
        context.extend_lease(60)

    command_id = send_command("orders", "Test", uuid4(), {})
    with running_worker(registry_with(wait)):
        wait_until(inside.is_set)
        with transaction.atomic():
            with pytest.raises(CommandRefusedError):
                cancel_command("orders", command_id)
            go_on.set()
            wait_until(lambda: status(command_id) == "COMPLETED")


def test_a_lock_of_somebody_else_does_not_take_a_lease_away() -> None:
    inside, go_on, extended = threading.Event(), threading.Event(), threading.Event()

    def wait(command: Any, context: Any) -> None:
        inside.set()
        go_on.wait(30)
        context.extend_lease(60)
        extended.set()

    command_id = send_command("orders", "Test", uuid4(), {})
    with running_worker(registry_with(wait)):
        wait_until(inside.is_set)
        with transaction.atomic():
            Command.objects.select_for_update().get(command_id=command_id)
            go_on.set()
            wait_until(extended.is_set)
        wait_until(lambda: status(command_id) == "COMPLETED")


def test_leases_can_be_extended_after_the_connection_was_lost() -> None:
    def extend(command: Any, context: Any) -> None:
        context.extend_lease(60)

    with running_worker(registry_with(extend)):
        for _ in range(2):
            command_id = send_command("orders", "Test", uuid4(), {})
            wait_until(lambda c=command_id: status(c) == "COMPLETED")  # type: ignore[misc]
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE '%extend%'"
                )
    assert reload(command_id).attempts == 1


def test_a_handler_that_breaks_its_own_transaction_is_tried_again() -> None:
    def break_it(command: Any, context: Any) -> None:
        transaction.set_rollback(True)

    command_id = send_command("orders", "Test", uuid4(), {})
    with running_worker(registry_with(break_it, retry_policy=RetryPolicy(backoff=(0,)))):
        wait_until(lambda: status(command_id) == "IN_TROUBLESHOOTING_QUEUE")
    assert reload(command_id).last_error_type == "TransactionManagementError"


def test_a_database_that_is_away_does_not_starve_the_domains_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(WorkerOptions(domains=("orders", "other")))
    found = [
        SimpleNamespace(command=SimpleNamespace(domain="orders", command_type="X"), lease=SimpleNamespace(msg_id=1))
    ]
    asked = []

    def receive(domain: str, room: int, **_: Any) -> list[Any] | None:
        asked.append(domain)
        return None if domain == "orders" else found

    monkeypatch.setattr(worker._fetcher, "_receive", receive)
    monkeypatch.setattr(worker._fetcher, "_fetch_suspect", lambda: None)
    assert worker.fetch_once() == 1
    found = []
    assert worker.fetch_once() is None  # nobody can say that nothing is ready
    assert asked == ["orders", "other", "other", "orders"]


class UnreadableError(Exception):
    @property
    def details(self) -> Any:
        raise RuntimeError("not even this")


def test_an_error_that_cannot_be_looked_at_costs_no_executor() -> None:
    def fail(command: Any, context: Any) -> None:
        if command.data:
            raise UnreadableError

    handlers = registry_with(fail, retry_policy=RetryPolicy(max_attempts=1))
    bad = send_command("orders", "Test", uuid4(), {"bad": True})
    with running_worker(handlers, concurrency=1):
        wait_until(lambda: reload(bad).last_error_type == "UnreadableError")
        good = send_command("orders", "Test", uuid4(), {})
        wait_until(lambda: status(good) == "COMPLETED")


def test_a_receiver_that_fails_when_a_connection_is_made_costs_no_executor() -> None:
    failures = ["once"]

    def fail(**_: Any) -> None:
        if failures and threading.current_thread().name.startswith("commandbus-execute"):
            failures.pop()
            raise RuntimeError("a bug of the project")

    connection_created.connect(fail)
    try:
        command_id = send("PlaceOrder")
        with running_worker(concurrency=1):
            wait_until(lambda: status(command_id) == "COMPLETED")
    finally:
        connection_created.disconnect(fail)
    assert reload(command_id).attempts == 1


def test_connections_that_were_ended_while_idle_cost_no_attempt() -> None:
    together = threading.Barrier(5)

    def work(command: Any, context: Any) -> None:
        if command.data:
            together.wait(20)

    send_commands("orders", [NewCommand("Test", uuid4(), {"wait": True}) for _ in range(5)])
    with running_worker(registry_with(work), concurrency=5):
        wait_until(lambda: Command.objects.filter(status="COMPLETED").count() == 5)
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE 'commandbus-execute%%'"
            )
        command_id = send_command("orders", "Test", uuid4(), {})
        wait_until(lambda: status(command_id) == "COMPLETED")
    assert [row.event_type for row in audit_trail("orders", command_id)] == ["SENT", "RECEIVED", "COMPLETED"]


def test_no_more_is_leased_than_the_database_takes_outcomes_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers can be quicker. What they did is not known yet, costs memory, and would be done again after a crash."""
    monkeypatch.setattr("commandbus.worker.finish.MOST_WAITING", 20)
    monkeypatch.setattr("commandbus.worker.backlog.MOST", 10)
    PgmqClient().create_queue("answers")
    send_commands("orders", [NewCommand("Test", uuid4(), {}, reply_to="answers") for _ in range(200)])
    commands = Command.objects.filter(domain="orders")
    handlers = registry_with(lambda command, context: None, transactional=False)
    with ExitStack() as locked:
        locked.enter_context(transaction.atomic())
        with connection.cursor() as cursor:
            cursor.execute("LOCK TABLE pgmq.q_answers IN SHARE MODE")
        with running_worker(handlers, poll_interval=60):
            wait_until(lambda: commands.filter(status="IN_PROGRESS").count() > 20)
            time.sleep(0.5)  # if it went on, it would now
            assert commands.filter(status="IN_PROGRESS").count() <= 20 + 4 * 10
            locked.close()
            wait_until(lambda: commands.filter(status="COMPLETED").count() == 200)
