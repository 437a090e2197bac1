"""A process stands still for longer than its lease, another takes over, and then it goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection

from commandbus import NewCommand, audit_trail, send_commands
from commandbus.messages import ErrorInfo, Failure, Finish, Status
from commandbus.models import Command, Node
from commandbus.pgmq import PgmqClient
from commandbus.testing.time import advance
from commandbus.transitions import PostgresTransitions
from tests.failpoints import POINTS
from tests.helpers import WorkerProcess, barrier, reload, replies, send, status, wait_until, worker_process
from tests.shop.models import Order
from tests.worker.test_kill import MODES, failpoint

pytestmark = pytest.mark.django_db(transaction=True)


def stand_still(stale: WorkerProcess) -> None:
    """The supervisor too, after the worker has stopped itself: else it would do so when all go on, for ever."""
    [node] = Node.objects.all()
    wait_until(lambda: Path(f"/proc/{node.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    stale.signal_all(signal.SIGSTOP)


@pytest.mark.parametrize("settings", MODES)
@pytest.mark.parametrize("point", POINTS[:4])
@pytest.mark.parametrize("kind", ["PlaceOrder", "SendMail"])
def test_a_stopped_process_that_goes_on_changes_nothing(kind: str, point: str, settings: str, tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    command_id = send(kind)
    changes = {"COMMANDBUS_FAILPOINT": failpoint(point, stopped, "SIGSTOP"), "COMMANDBUS_TEST_SETTINGS": settings}
    with worker_process("orders", "--vt=1", "--name=stale", **changes) as stale:
        wait_until(stopped.exists, f"the point {point}")
        stand_still(stale)
        with worker_process("orders", "--vt=1", "--name=owner", **changes):
            wait_until(lambda: status(command_id) == "COMPLETED")
            before = [(row.event_type, row.ts) for row in audit_trail("orders", command_id)]
            stale.signal_all(signal.SIGCONT)
            output = stale.end()
    assert stale.returncode == 0, output
    assert [(row.event_type, row.ts) for row in audit_trail("orders", command_id)] == before
    assert len(replies()) == 1
    assert Order.objects.count() == (1 if kind == "PlaceOrder" else 0)


def test_a_stopped_process_holds_up_nobody_between_finish_and_commit(tmp_path: Path) -> None:
    """Its row is locked. The others wait for neither it nor the rest of the queue; what it has finished stays so."""
    stopped = tmp_path / "stopped"
    first = send("PlaceOrder")
    changes = {"COMMANDBUS_FAILPOINT": failpoint("between_finish_and_commit", stopped, "SIGSTOP")}
    with worker_process("orders", "--vt=1", "--name=stale", **changes) as stale:
        wait_until(stopped.exists)
        stand_still(stale)
        with worker_process("orders", "--vt=1", "--name=owner", **changes):
            others = send_commands("orders", [NewCommand("PlaceOrder", uuid4(), {}) for _ in range(20)])
            wait_until(lambda: Command.objects.filter(command_id__in=others, status="COMPLETED").count() == 20)
            assert reload(first).lease_read_ct is not None
            stale.signal_all(signal.SIGCONT)
            wait_until(lambda: status(first) == "COMPLETED")
            stale.end()
    assert Order.objects.count() == 21
    assert len(replies()) == 21


@pytest.mark.parametrize("settings", [{"MARK_IN_PROGRESS": True}, {"MARK_IN_PROGRESS": False}])
def test_an_old_token_opens_nothing(settings: dict[str, Any]) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE command_bus_domain SET mark_in_progress = %s WHERE name = 'orders'", [settings["MARK_IN_PROGRESS"]]
        )
    bus = PostgresTransitions("default")
    command_id = send("PlaceOrder")
    [old] = bus.receive("orders", qty=1, vt=30)
    advance("orders", 31)
    [new] = bus.receive("orders", qty=1, vt=30)
    before = Command.objects.values().get(command_id=command_id)
    error = ErrorInfo("E", "E", "e")

    assert bus.finish("orders", [Finish(old.lease, Status.COMPLETED)]) == set()
    assert bus.fail("orders", [Failure(old.lease, error, 0)]) == {}
    assert bus.fail("orders", [Failure(old.lease, error)]) == {}
    assert bus.release("orders", [old.lease]) == set()
    assert bus.extend("orders", [old.lease], 3600) == {}
    assert bus.unhandled("orders", [old.lease], 0) == {}

    assert Command.objects.values().get(command_id=command_id) == before
    assert PgmqClient().metrics("orders__commands").queue_length == 1
    assert PgmqClient().metrics("orders__commands").queue_visible_length == 0
    assert replies() == []
    assert bus.finish("orders", [Finish(new.lease, Status.COMPLETED)]) == {command_id}


def test_a_process_that_was_only_slow_is_not_suspected() -> None:
    """It stood still past its lease, but it was heard of again before anyone looked."""
    with barrier() as gate, worker_process("orders", "--vt=1", "--name=slow") as slow:
        command_id = send("PlaceOrder", barrier=gate.key)
        wait_until(gate.arrived)
        [node] = Node.objects.all()
        os.kill(node.pid, signal.SIGSTOP)
        wait_until(lambda: PgmqClient().metrics("orders__commands").queue_visible_length == 1)
        os.kill(node.pid, signal.SIGCONT)
        wait_until(lambda: PgmqClient().metrics("orders__commands").queue_visible_length == 0)
        gate.open()
        wait_until(lambda: status(command_id) == "COMPLETED")
        slow.end()
    assert [row.event_type for row in audit_trail("orders", command_id)] == ["SENT", "RECEIVED", "COMPLETED"]
