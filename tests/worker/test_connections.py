"""PostgreSQL ends a connection of the worker, and the worker does not mind."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import DatabaseError, connection, transaction

from commandbus import (
    NewCommand,
    RetryPolicy,
    TransientCommandError,
    audit_trail,
    nodes,
    send_command,
    send_commands,
)
from commandbus.models import Command, Node, Suspect
from commandbus.transitions import PostgresTransitions
from tests.helpers import (
    PATIENCE,
    barrier,
    registry_with,
    reload,
    replies,
    running_worker,
    send,
    status,
    unreachable,
    wait_until,
    worker_process,
)
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


def terminate(name: str) -> int:
    """End the sessions of the worker's threads of this name."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE %s",
            [f"commandbus-{name}%"],
        )
        return int(cursor.fetchone()[0])


@pytest.mark.parametrize("name", ["fetch", "execute", "finish", "keep", "fold", ""])
def test_any_connection_may_be_terminated_under_load(name: str) -> None:
    ids = send_commands(
        "orders", [NewCommand("PlaceOrder" if n % 2 else "SendMail", uuid4(), {"sleep": 0.02}) for n in range(120)]
    )
    with worker_process("orders", "--concurrency=4", "--vt=3") as worker:
        for done in (10, 30, 50):
            wait_until(lambda d=done: Command.objects.filter(status="COMPLETED").count() >= d)  # type: ignore[misc]
            wait_until(lambda: terminate(name))
        wait_until(lambda: Command.objects.filter(status="COMPLETED").count() == len(ids))
        worker.end()
    assert worker.returncode == 0
    assert Order.objects.count() == 60
    assert len(replies()) == 120
    assert set(Command.objects.values_list("attempts", "vanished_count", "crash_count")) == {(1, 0, 0)}
    assert not Suspect.objects.exists()


def test_a_keeper_that_lost_its_connection_keeps_on_keeping() -> None:
    with barrier() as gate, running_worker(vt=1):
        command_id = send("PlaceOrder", barrier=gate.key)
        wait_until(gate.arrived)
        until = reload(command_id).lease_expires_at
        wait_until(lambda: terminate("keep"))
        wait_until(lambda: reload(command_id).lease_expires_at != until)
        gate.open()
        wait_until(lambda: status(command_id) == "COMPLETED")
    assert reload(command_id).attempts == 1


def test_what_was_leased_by_a_call_without_an_answer_is_given_back_on_reconnect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long before the lease runs out, and without an attempt."""
    receive = PostgresTransitions.receive
    lost: list[object] = []

    def lose(self: PostgresTransitions, *args: object, **kwargs: object) -> object:
        received = receive(self, *args, **kwargs)  # type: ignore[arg-type]
        if received and not lost:
            lost.append(received)
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        return received

    monkeypatch.setattr(PostgresTransitions, "receive", lose)
    command_id = send("PlaceOrder")
    with running_worker(vt=3600):
        wait_until(lambda: status(command_id) == "COMPLETED")
    assert lost
    assert reload(command_id).attempts == 1


def test_an_outage_that_is_longer_than_the_leases_makes_no_suspects_and_runs_nothing_twice() -> None:
    """Two workers come back at the same time. Neither takes what the other is running."""
    with (
        worker_process("orders", "--vt=1", "--name=a", "--concurrency=4"),
        worker_process("orders", "--vt=1", "--name=b", "--concurrency=4"),
    ):
        wait_until(lambda: Node.objects.count() == 2)
        ids = send_commands("orders", [NewCommand("SendMail", uuid4(), {"sleep": 6}) for _ in range(4)])
        wait_until(lambda: Command.objects.filter(status="IN_PROGRESS").count() == 4)
        with unreachable("default"):
            time.sleep(3)  # the fault itself: it lasts longer than the leases
        wait_until(lambda: Command.objects.filter(status="COMPLETED").count() == 4)
    for command_id in ids:
        assert [row.event_type for row in audit_trail("orders", command_id)] == ["SENT", "RECEIVED", "COMPLETED"]


def test_a_worker_that_ends_unsure_of_its_leases_does_not_give_back_what_it_runs() -> None:
    with barrier() as gate, running_worker() as worker:
        command_id = send("PlaceOrder", barrier=gate.key)
        wait_until(gate.arrived)
        looked = threading.Event()
        worker._fetcher.fetch = lambda room: looked.set()  # type: ignore[method-assign]
        wait_until(looked.is_set)  # from now on it takes nothing
        worker._fetcher._unsure.add("orders")
        unknown = send("PlaceOrder", barrier=gate.key)
        PostgresTransitions("default").receive("orders", qty=1, vt=3600, node_id=worker.node_id)
        worker.stop()
        wait_until(lambda: status(unknown) == "PENDING")
        gate.open()
    assert [row.event_type for row in audit_trail("orders", command_id)] == ["SENT", "RECEIVED", "COMPLETED"]


def test_a_node_is_registered_once_however_often_that_is_tried() -> None:
    """The answer of the first call may have been lost."""
    for _ in range(2):
        nodes.register("default", node_id=UUID(int=1), name="n", role="worker", domains=["orders"], handled_types={})
    assert Node.objects.count() == 1


@pytest.mark.parametrize("swallow", [True, False])
def test_a_handler_that_hides_its_lost_connection_does_not_spoil_its_seat(swallow: bool) -> None:
    def lose(command: Any, context: Any) -> None:
        if not command.data:
            return
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        except DatabaseError:
            if not swallow:
                raise TransientCommandError("GONE", "try later") from None

    handlers = registry_with(lose, transactional=False, retry_policy=RetryPolicy(max_attempts=1))
    first = send_command("orders", "Test", uuid4(), {"lose": 1})
    with running_worker(handlers, concurrency=1):
        wait_until(lambda: status(first) == ("COMPLETED" if swallow else "PENDING"))
        wait_until(lambda: reload(first).lease_read_ct is None)
        second = send_command("orders", "Test", uuid4(), {})
        wait_until(lambda: status(second) == "COMPLETED")
    assert [row.event_type for row in audit_trail("orders", second)] == ["SENT", "RECEIVED", "COMPLETED"]


def test_a_lease_that_cannot_be_extended_because_of_a_lock_does_not_upset_the_fetcher(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = threading.Event()

    def wait(command: Any, context: Any) -> None:
        done.wait(PATIENCE)

    caplog.set_level(logging.INFO, "commandbus.worker")
    with running_worker(registry_with(wait, transactional=False), vt=1) as worker:
        command_id = send_command("orders", "Test", uuid4(), {})
        wait_until(lambda: worker._leases.of("orders"), "the lease")
        lease = worker._leases.of("orders")[0]
        with transaction.atomic():
            list(Command.objects.select_for_update().filter(command_id=command_id))
            wait_until(
                lambda: worker._leases._held["orders"][lease.token][1] < time.monotonic() - 1, "the end of the lease"
            )
            assert not worker._leases.have_run_out("orders")
        done.set()
        wait_until(lambda: status(command_id) == "COMPLETED")
    assert "fetch.recovered" not in caplog.text
