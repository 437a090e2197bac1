"""Receiving beside others: locks, delays and old snapshots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from django.db import connection, connections, transaction

from commandbus import NewCommand, pause_domain, resume_domain, send_commands
from commandbus.messages import Finish, Status
from commandbus.models import Command
from commandbus.pgmq import PgmqClient
from commandbus.testing.time import advance
from commandbus.transitions import PostgresTransitions
from commandbus.worker.position import FULL_SECONDS, SLOW_SECONDS, Position
from tests.helpers import WAITING_SESSIONS, libpq_parameters, replies, running_worker, send, status, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

QUEUE = "pgmq.q_orders__commands"


@pytest.fixture
def bus() -> PostgresTransitions:
    return PostgresTransitions("default")


class Elsewhere(threading.Thread):
    """Runs something on a connection of its own, in a transaction that it leaves open until it is told to commit."""

    def __init__(self, action: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.action = action
        self.result: Any = None
        self.done, self.go_on = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with transaction.atomic():
                self.result = self.action()
                self.done.set()
                self.go_on.wait(30)
        finally:
            connections.close_all()

    def commit(self) -> Any:
        self.go_on.set()
        self.join(30)
        return self.result


def somebody_waits() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(WAITING_SESSIONS)
        return bool(cursor.fetchone()[0])


def entries_read(action: Callable[[], Any]) -> tuple[Any, int]:
    """The result of an action, and how much of the queue and its indexes was read for it, dead entries included."""

    def read() -> int:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT sum(pg_stat_get_xact_tuples_returned(oid)) FROM pg_class"
                " WHERE oid = %s::regclass OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = %s::regclass)",
                [QUEUE, QUEUE],
            )
            return int(cursor.fetchone()[0])

    before = read()
    return action(), read() - before


def test_receive_skips_a_command_that_is_being_finished_and_the_finish_goes_through(bus: PostgresTransitions) -> None:
    """The lease has run out. Receive has the message first, the finisher the command: neither waits for both."""
    command_id, other = send("PlaceOrder"), send("PlaceOrder")
    [lease, _] = [received.lease for received in bus.receive("orders", qty=2, vt=30)]
    advance("orders", 31)
    with transaction.atomic():
        list(Command.objects.select_for_update().filter(command_id=command_id))  # as finish does it first
        receiver = Elsewhere(lambda: bus.receive("orders", qty=10, vt=30))
        assert receiver.done.wait(30), "receive has waited for a command row"
        finisher_result: list[set[Any]] = []
        threading.Timer(0, receiver.go_on.set).start()
        finisher_result.append(bus.finish("orders", [Finish(lease, Status.COMPLETED)]))  # waits for the message's row
    assert [received.command.command_id for received in receiver.commit()] == [other]
    assert finisher_result == [{command_id}]
    assert (status(command_id), len(replies())) == ("COMPLETED", 1)
    assert PgmqClient().metrics("orders__commands").queue_length == 1


def test_a_finish_that_waits_for_a_receive_finds_its_lease_gone(bus: PostgresTransitions) -> None:
    command_id = send("PlaceOrder")
    [old] = bus.receive("orders", qty=1, vt=30)
    advance("orders", 31)
    receiver = Elsewhere(lambda: bus.receive("orders", qty=1, vt=30))
    assert receiver.done.wait(30)
    finisher = Elsewhere(lambda: bus.finish("orders", [Finish(old.lease, Status.COMPLETED)]))
    wait_until(somebody_waits)
    [new] = receiver.commit()
    assert finisher.commit() == set()
    assert bus.finish("orders", [Finish(new.lease, Status.COMPLETED)]) == {command_id}
    assert len(replies()) == 1


def test_what_somebody_has_locked_is_back_in_a_second_and_keeps_its_attempts(bus: PostgresTransitions) -> None:
    command_id = send("PlaceOrder")
    with transaction.atomic():
        list(Command.objects.select_for_update().filter(command_id=command_id))
        assert Elsewhere(lambda: bus.receive("orders", qty=1, vt=3600)).commit() == []
    advance("orders", 1)
    [received] = bus.receive("orders", qty=1, vt=30)
    assert received.attempt == 1


def test_ready_commands_are_found_at_once_behind_100000_delayed_ones(bus: PostgresTransitions) -> None:
    PgmqClient().purge("orders__commands")  # of the dead entries that tests before have rolled back
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pgmq.send_batch('orders__commands',"
            " ARRAY(SELECT '{}'::jsonb FROM generate_series(1, 100000)), 3600)"
        )
    ids = send_commands("orders", [NewCommand("PlaceOrder", uuid4(), {}) for _ in range(10)])
    with transaction.atomic():
        received, read = entries_read(lambda: bus.receive("orders", qty=100, vt=30))
    assert {one.command.command_id for one in received} == set(ids)
    assert read < 100


@pytest.fixture
def old_snapshot() -> Iterator[None]:
    with psycopg.connect(**libpq_parameters()) as other:
        other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        other.execute("SELECT count(*) FROM pg_class")
        yield


def test_beside_an_old_snapshot_a_reader_can_start_where_it_was(bus: PostgresTransitions, old_snapshot: None) -> None:
    """PostgreSQL may not forget what was taken. Without a floor every read passes it again."""
    send_commands("orders", [NewCommand("PlaceOrder", uuid4(), {}) for _ in range(3000)])
    taken = bus.receive("orders", qty=3000, vt=30)
    bus.finish("orders", [Finish(received.lease, Status.COMPLETED) for received in taken])
    floor = max(received.lease.msg_id for received in taken) + 1
    command_id = send("PlaceOrder")

    with transaction.atomic():
        [received], read = entries_read(lambda: bus.receive("orders", qty=100, vt=30))
        assert read > 3000
        transaction.set_rollback(True)
    with transaction.atomic():
        [received], read = entries_read(lambda: bus.receive("orders", qty=100, vt=30, floor=floor))
        assert read < 10
    assert received.command.command_id == command_id


def test_a_worker_beside_an_old_snapshot_finds_everything(old_snapshot: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also retries, whose message is below the floor that it has reached."""
    monkeypatch.setattr("commandbus.worker.position.SLOW_SECONDS", -1.0)  # as if every read were slow
    ids = send_commands("orders", [NewCommand("PlaceOrder", uuid4(), {"fail_attempts": n % 2}) for n in range(200)])
    with running_worker():
        wait_until(lambda: Command.objects.filter(status="COMPLETED").count() == len(ids))


def test_a_floor_is_used_only_after_a_slow_read_and_for_a_second() -> None:
    position = Position()
    quick, slow = SLOW_SECONDS / 2, SLOW_SECONDS * 2
    assert position.floor(0) is None
    position.was_read(None, 100, 100 + quick, 7)
    assert position.floor(100.1) is None
    position.was_read(None, 101, 101 + slow, 9)
    assert position.floor(101.2) == 10
    position.was_read(10, 101.2, 101.3, 30)
    assert position.floor(101.4) == 31
    position.was_read(31, 101.4, 101.5, None)
    assert position.floor(101.6) == 31
    assert position.floor(101 + slow + FULL_SECONDS) is None
    position.was_read(None, 103, 103 + quick, 3)
    assert position.floor(103.1) is None


def test_a_slow_read_that_found_nothing_yet_says_no_floor() -> None:
    position = Position()
    position.was_read(None, 0, 100, None)
    assert position.floor(100.1) is None


def test_pausing_stops_receiving_and_not_sending_and_resuming_wakes_the_workers() -> None:
    assert pause_domain("orders")
    assert not pause_domain("orders")
    with running_worker(poll_interval=60) as worker:
        command_id = send("PlaceOrder")
        worker._changed.set()  # it looks, and finds nothing
        wait_until(lambda: not worker._changed.is_set())
        assert status(command_id) == "PENDING"
        assert resume_domain("orders")
        wait_until(lambda: status(command_id) == "COMPLETED")
    assert not resume_domain("orders")
