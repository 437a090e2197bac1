"""Handlers that take long, and handlers that take too long."""

from __future__ import annotations

import threading
import time
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from django.db import connection

from commandbus import NewCommand, PermanentCommandError, RetryPolicy, audit_trail, send_command, send_commands
from commandbus.models import Command, Node, Suspect
from commandbus.testing.time import advance
from commandbus.transitions import PostgresTransitions
from commandbus.worker.options import Ending
from tests.helpers import (
    PATIENCE,
    barrier,
    registry_with,
    reload,
    replies,
    running_worker,
    send,
    status,
    wait_until,
    worker_process,
)
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

AT_ONCE = RetryPolicy(max_attempts=2, backoff=(0,))


def test_a_handler_of_three_times_the_lease_runs_once() -> None:
    """Another worker is there that could take it."""
    kinds = ("PlaceOrder", "SendMail")
    with worker_process("orders", "--vt=1", "--name=a"), worker_process("orders", "--vt=1", "--name=b"):
        ids = send_commands("orders", [NewCommand(kind, uuid4(), {"sleep": 3}) for kind in kinds])
        wait_until(lambda: Command.objects.filter(status="COMPLETED").count() == len(ids))
    for command_id in ids:
        assert [row.event_type for row in audit_trail("orders", command_id)] == ["SENT", "RECEIVED", "COMPLETED"]
    assert len(replies()) == 2


@pytest.mark.parametrize("transactional", [True, False])
def test_a_handler_that_hangs_is_written_off_and_the_rest_goes_on(transactional: bool) -> None:
    hanging = threading.Event()
    calls: list[int] = []

    def hang(command: Any, context: Any) -> None:
        if command.data.get("hang"):
            calls.append(context.attempt)
            Order.objects.create(number="must not stay" if transactional else "stays")
            hanging.wait(60)

    handlers = registry_with(hang, timeout=0.2, retry_policy=AT_ONCE, transactional=transactional)
    hung = send_command("orders", "Test", uuid4(), {"hang": True})
    Command.objects.filter(command_id=hung).update(max_attempts=2)
    with running_worker(handlers, concurrency=1) as worker:
        wait_until(lambda: status(hung) == "IN_TROUBLESHOOTING_QUEUE")
        others = send_commands("orders", [NewCommand("Test", uuid4(), {}) for _ in range(20)])
        wait_until(lambda: Command.objects.filter(command_id__in=others, status="COMPLETED").count() == 20)
        if transactional:
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT count(*) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND state LIKE 'idle in transaction%%'"
                )
                assert cursor.fetchone() == (0,)  # its locks are gone, though its thread is not
        hanging.set()
        wait_until(lambda: worker._pool.is_rid_of_all())
    assert calls == [1, 2]
    assert reload(hung).last_error_code == "TIMEOUT"
    assert Order.objects.count() == (0 if transactional else 2)
    assert len(replies()) == 20


@pytest.mark.parametrize("transactional", [True, False])
def test_a_statement_that_hangs_is_canceled(transactional: bool) -> None:
    def wait(command: Any, context: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock_shared(%s)", [command.data["barrier"]])

    handlers = registry_with(wait, timeout=0.2, transactional=transactional, retry_policy=AT_ONCE)
    with barrier() as gate, running_worker(handlers, concurrency=1) as worker:
        command_id = send_command("orders", "Test", uuid4(), {"barrier": gate.key})
        wait_until(lambda: reload(command_id).last_error_code == "TIMEOUT")
        gate.open()
        wait_until(lambda: status(command_id) in {"COMPLETED", "IN_TROUBLESHOOTING_QUEUE"})
        wait_until(lambda: worker._pool.is_rid_of_all())


def test_a_coroutine_that_does_not_let_go_is_written_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commandbus.worker.turn.ASYNC_GRACE", 0.1)
    hanging = threading.Event()

    async def hang(command: Any, context: Any) -> None:
        hanging.wait(60)

    handlers = registry_with(hang, timeout=0.1, transactional=False, retry_policy=AT_ONCE)
    command_id = send_command("orders", "Test", uuid4(), {})
    with running_worker(handlers, concurrency=1):
        wait_until(lambda: reload(command_id).last_error_code == "TIMEOUT")
        hanging.set()


def test_of_a_group_that_runs_one_by_one_only_the_late_one_is_late() -> None:
    hanging = threading.Event()

    def run(commands: list[Any], context: Any) -> None:
        if len(commands) > 1:
            raise RuntimeError("not together")
        if commands[0].data["n"] == 1:
            hanging.wait(60)

    handlers = registry_with(run, timeout=0.3, batch_size=3, retry_policy=RetryPolicy(max_attempts=1))
    ids = send_commands("orders", [NewCommand("Test", uuid4(), {"n": n}) for n in range(3)])
    Command.objects.update(max_attempts=1)
    with running_worker(handlers, concurrency=1):
        wait_until(lambda: status(ids[1]) == "IN_TROUBLESHOOTING_QUEUE")
        wait_until(lambda: status(ids[0]) == status(ids[2]) == "COMPLETED")
        hanging.set()
    assert reload(ids[1]).last_error_code == "TIMEOUT"


def test_those_that_have_failed_before_the_late_one_have_failed() -> None:
    hanging = threading.Event()
    alone: list[int] = []

    def run(commands: list[Any], context: Any) -> None:
        if len(commands) > 1:
            raise RuntimeError("not together")
        number = commands[0].data["n"]
        alone.append(number)
        if number == 0:
            raise PermanentCommandError("NO", "never")
        if number == 1:
            hanging.wait(60)

    handlers = registry_with(run, timeout=0.3, batch_size=3, retry_policy=RetryPolicy(max_attempts=1))
    ids = send_commands("orders", [NewCommand("Test", uuid4(), {"n": n}) for n in range(3)])
    Command.objects.update(max_attempts=1)
    with running_worker(handlers, concurrency=1):
        wait_until(lambda: status(ids[0]) == status(ids[1]) == "IN_TROUBLESHOOTING_QUEUE")
        wait_until(lambda: status(ids[2]) == "COMPLETED")
        hanging.set()
    assert sorted(alone) == [0, 1, 2]
    assert reload(ids[0]).last_error_code == "NO"


def test_a_process_with_a_thread_that_hangs_is_recycled() -> None:
    """As soon as its other handlers have ended; a replacement starts before that."""
    command_id = send("Hang", seconds=60)
    with worker_process("orders", "--concurrency=2") as worker:
        wait_until(lambda: status(command_id) == "IN_TROUBLESHOOTING_QUEUE")
        wait_until(lambda: Node.objects.count() == 2)
        later = send("PlaceOrder")
        wait_until(lambda: status(later) == "COMPLETED")
        output = worker.end()
    assert worker.returncode == 0
    assert "worker.recycled" in output
    assert output.count("worker.started") >= 2


def test_a_slow_worker_is_not_recycled_without_a_supervisor() -> None:
    hanging = threading.Event()

    def hang(command: Any, context: Any) -> None:
        hanging.wait(60)

    command_id = send_command("orders", "Test", uuid4(), {})
    handlers = registry_with(hang, timeout=0.1, retry_policy=RetryPolicy(max_attempts=1))
    with running_worker(handlers) as worker:
        wait_until(lambda: reload(command_id).last_error_code == "TIMEOUT")
        worker._pool._written_off = [(thread, time.monotonic() - 3600) for thread, _ in worker._pool._written_off]
        worker._watch("default")
        assert not worker._stopping.is_set()
        worker._supervised = True
        worker._watch("default")
        assert worker.ending is Ending.RECYCLE
        hanging.set()


def test_of_a_group_that_takes_too_long_together_only_the_late_one_is_late() -> None:
    hanging = threading.Event()

    def run(commands: list[Any], context: Any) -> None:
        if any(command.data["n"] == 1 for command in commands):
            hanging.wait(60)

    handlers = registry_with(run, timeout=0.3, batch_size=3, retry_policy=RetryPolicy(max_attempts=1))
    ids = send_commands("orders", [NewCommand("Test", uuid4(), {"n": n}) for n in range(3)])
    Command.objects.update(max_attempts=1)
    with running_worker(handlers, concurrency=1):
        wait_until(lambda: status(ids[1]) == "IN_TROUBLESHOOTING_QUEUE")
        wait_until(lambda: status(ids[0]) == status(ids[2]) == "COMPLETED")
        hanging.set()


def test_a_session_that_cannot_be_ended_costs_neither_the_command_nor_the_seat(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise psycopg.errors.CancellationTimeout("nobody answers")

    monkeypatch.setattr(psycopg.Connection, "cancel_safe", refuse)
    hanging = threading.Event()

    def hang(command: Any, context: Any) -> None:
        if command.data.get("hang"):
            Order.objects.exists()
            hanging.wait(60)

    handlers = registry_with(hang, timeout=0.2, transactional=False, retry_policy=RetryPolicy(max_attempts=1))
    hung = send_command("orders", "Test", uuid4(), {"hang": True})
    with running_worker(handlers, concurrency=1):
        wait_until(lambda: reload(hung).last_error_code == "TIMEOUT")
        other = send_command("orders", "Test", uuid4(), {})
        wait_until(lambda: status(other) == "COMPLETED")
        wait_until(lambda: "session.not_ended" in caplog.text)
        hanging.set()


def test_a_process_does_not_wait_for_a_coroutine_that_hangs() -> None:
    """Python would: the thread that runs it belongs to a pool."""
    command_id = send("HangAsync", seconds=600)
    with worker_process("orders") as worker:
        wait_until(lambda: status(command_id) == "IN_TROUBLESHOOTING_QUEUE")
        worker.end()
    assert worker.returncode == 0


def test_no_suspect_is_run_beside_a_thread_that_was_written_off() -> None:
    """If that one kills the process after all, another would be blamed."""
    ids = [send("Late"), send("SendMail", sleep=1.5), send("Late")]
    Command.objects.update(max_attempts=1)
    bus = PostgresTransitions("default")
    bus.receive("orders", qty=10, vt=30, node_id=uuid4())
    advance("orders", 100)
    bus.receive("orders", qty=10, vt=30)
    assert Suspect.objects.count() == 3
    with worker_process("orders"):
        wait_until(lambda: not Command.objects.filter(status__in=["PENDING", "IN_PROGRESS"]).exists())
    assert [status(i) for i in ids] == ["IN_TROUBLESHOOTING_QUEUE", "COMPLETED", "IN_TROUBLESHOOTING_QUEUE"]
    assert reload(ids[1]).crash_count == 0


def test_a_group_that_is_written_off_while_the_worker_ends_leaves_no_lease_behind() -> None:
    started, released = threading.Event(), threading.Event()

    def hang_together(commands: Any, context: Any) -> None:
        if len(commands) > 1:
            started.set()
            released.wait(PATIENCE)

    ids = send_commands("orders", [NewCommand("Test", uuid4(), {}) for _ in range(3)])
    with running_worker(registry_with(hang_together, timeout=0.5, batch_size=3), concurrency=1, vt=3600) as worker:
        assert started.wait(PATIENCE)
        worker.stop()  # its timeout passes while it ends
    released.set()
    assert [reload(command_id).lease_read_ct for command_id in ids] == [None] * 3
