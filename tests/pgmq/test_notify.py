from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from django.db import DatabaseError, connection, transaction
from django.test import override_settings

from commandbus import send_command
from commandbus.models import Command
from commandbus.pgmq import notify
from commandbus.pgmq.notify import channel, channel_of_node, clear_idle, set_idle, wake
from commandbus.transitions import PostgresTransitions
from commandbus.worker.options import WorkerOptions
from commandbus.worker.worker import Worker
from tests.helpers import listening, running_worker, send, status, wait_until

NODE = uuid4()

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "_nobody_idle_until", {})


@pytest.fixture
def heard() -> Iterator[threading.Event]:
    with listening("default", [channel("orders"), channel_of_node(NODE)]) as event:
        yield event


def idle_workers() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM command_bus_idle_worker")
        return int(cursor.fetchone()[0])


def test_a_send_wakes_an_idle_worker_after_the_commit(heard: threading.Event) -> None:
    set_idle(["orders"], NODE, "default")
    with transaction.atomic():
        send()
        assert idle_workers() == 1
    wait_until(heard.is_set)
    assert idle_workers() == 0


def test_a_send_that_commits_by_itself_wakes_it_in_the_same_round_trip(
    heard: threading.Event, django_assert_num_queries: Any
) -> None:
    set_idle(["orders"], NODE, "default")
    command_id = uuid4()
    with django_assert_num_queries(1):
        send_command("orders", "SendMail", command_id, {})
    wait_until(heard.is_set)
    assert idle_workers() == 0


def test_nobody_is_notified_when_nobody_is_idle(heard: threading.Event) -> None:
    send()
    assert not wake("orders", "default")
    set_idle(["orders", "other"], NODE, "default")
    assert not wake("orders", "default")  # it remembers for a moment that nobody was
    assert not heard.is_set()


def test_each_wake_takes_one_flag() -> None:
    first, second = uuid4(), uuid4()
    for node in (first, second, second):
        set_idle(["orders"], node, "default")
    assert idle_workers() == 2
    assert wake("orders", "default")
    assert idle_workers() == 1
    clear_idle(first, "default")
    assert idle_workers() == 0


def test_a_send_wakes_one_of_many_however_it_is_planned() -> None:
    with connection.cursor() as cursor:
        set_idle(["orders"], NODE, "default")
        cursor.execute("VACUUM ANALYZE command_bus_idle_worker")  # as if there were never more than one
        clear_idle(NODE, "default")
        cursor.execute(
            "INSERT INTO command_bus_idle_worker (domain, node_id, idle_since)"
            " SELECT 'orders', lpad(n::text, 32, '0')::uuid, now() - make_interval(secs => n)"
            " FROM generate_series(1, 5) AS n"
        )
    connection.close()  # plans and all
    send()
    assert idle_workers() == 4


def test_a_worker_does_not_wait_for_a_transaction_that_will_wake_it() -> None:
    set_idle(["orders"], NODE, "default")
    other = connection.copy()
    try:
        with transaction.atomic():
            assert wake("orders", "default")
            with other.cursor() as cursor:
                cursor.execute("SET lock_timeout = '5s'")
                cursor.execute("SELECT commandbus.set_idle(ARRAY['orders', 'payments'], %s)", [NODE])
                cursor.execute("SELECT commandbus.clear_idle(%s)", [NODE])
    finally:
        other.close()
    assert idle_workers() == 0


def full_worker() -> Worker:
    """A worker that was woken and has room for one command."""
    worker = Worker(WorkerOptions(domains=("orders",), concurrency=1))
    worker._keepers["default"].keep_once()
    worker._changed.was_notified = True
    return worker


def test_a_woken_worker_that_is_full_wakes_another() -> None:
    worker = full_worker()
    set_idle(["orders"], NODE, "default")
    worker._backlog._held = 1000
    assert worker.fetch_once() is None
    assert idle_workers() == 0


def test_a_woken_worker_that_waits_for_the_database_wakes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    send()
    worker = full_worker()
    set_idle(["orders"], NODE, "default")
    monkeypatch.setattr(worker._finishers["default"], "is_behind", lambda: True)
    assert worker.fetch_once() is None
    assert idle_workers() == 0


def test_a_woken_worker_that_may_leave_something_behind_wakes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    send()
    worker = full_worker()
    set_idle(["orders"], NODE, "default")
    monkeypatch.setattr(worker, "_room", lambda: 1)
    assert worker.fetch_once() == 1
    assert idle_workers() == 0


def test_the_flags_of_a_dead_worker_are_taken_away() -> None:
    set_idle(["orders", "payments"], NODE, "default")
    PostgresTransitions("default").node_died("orders", NODE)
    assert idle_workers() == 0


def test_a_wake_concerns_one_worker_alone(heard: threading.Event) -> None:
    set_idle(["orders"], NODE, "default")
    set_idle(["orders"], uuid4(), "default")
    assert wake("orders", "default")
    assert not heard.wait(0.3)  # the other one has worked last
    assert wake("orders", "default")
    wait_until(heard.is_set)


def test_the_notification_can_be_part_of_the_transaction(heard: threading.Event) -> None:
    with override_settings(COMMANDBUS={"NOTIFY": "in_transaction"}):
        send()
    wait_until(heard.is_set)


def test_it_can_be_switched_off(heard: threading.Event) -> None:
    set_idle(["orders"], NODE, "default")
    with override_settings(COMMANDBUS={"NOTIFY": "off"}):
        send()
    assert idle_workers() == 1


def test_a_duplicate_wakes_nobody() -> None:
    command_id = uuid4()
    send_command("orders", "SendMail", command_id, {})
    set_idle(["orders"], NODE, "default")
    send_command("orders", "SendMail", command_id, {})
    assert idle_workers() == 1


def test_a_failing_wake_up_does_not_harm_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE command_bus_idle_worker RENAME TO away")
    try:
        with transaction.atomic():
            command_id = send()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE away RENAME TO command_bus_idle_worker")
    assert status(command_id) == "PENDING"
    with pytest.raises(DatabaseError), connection.cursor() as cursor:
        cursor.execute("SELECT * FROM away")


def test_an_idle_worker_is_woken_long_before_its_poll() -> None:
    with running_worker(poll_interval=3600):
        wait_until(lambda: idle_workers() == 1)
        time.sleep(0.2)  # it looks once more after it has announced that it is idle
        command_id = send()
        wait_until(lambda: status(command_id) == "COMPLETED")
        again = send()
        wait_until(lambda: status(again) == "COMPLETED")


def test_a_worker_that_only_polls_finds_everything_too() -> None:
    with running_worker(use_notify=False, poll_interval=0.05):
        command_id = send()
        wait_until(lambda: status(command_id) == "COMPLETED")
    assert Command.objects.count() == 1
