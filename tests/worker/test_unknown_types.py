from __future__ import annotations

import json
import time
from datetime import datetime, timedelta
from uuid import uuid4

import pytest
from django.utils import timezone

from commandbus import NewCommand, audit_trail, nodes, send_commands
from commandbus.handlers import Handler, HandlerRegistry
from commandbus.models import Audit, Command, CommandType, Node
from commandbus.pgmq import PgmqClient
from commandbus.transitions import PostgresTransitions
from tests.helpers import reload, running_worker, send, send_many, status, wait_until, worker_process

pytestmark = pytest.mark.django_db(transaction=True)

IMPATIENT = json.dumps({"UNKNOWN_TYPE_GRACE": 1})


def test_a_rolling_deploy_sends_nothing_to_troubleshooting() -> None:
    """The old worker gets the new commands first, and keeps running."""
    ids = send_commands("orders", [NewCommand("NewKind", uuid4(), {}) for _ in range(20)])
    old_code = {"COMMANDBUS_TEST_OLD_CODE": "1", "COMMANDBUS_TEST_SETTINGS": IMPATIENT}
    with worker_process("orders", "--name=new", COMMANDBUS_TEST_SETTINGS=IMPATIENT):
        wait_until(lambda: Command.objects.filter(status="COMPLETED").count() == 20)
        with worker_process("orders", "--name=old", **old_code):
            for _ in range(5):
                ids += send_commands("orders", [NewCommand("NewKind", uuid4(), {}) for _ in range(20)])
            wait_until(lambda: Command.objects.filter(status="COMPLETED").count() == len(ids))
    assert set(Command.objects.values_list("status", "attempts")) == {("COMPLETED", 1)}


def test_commands_wait_for_the_worker_that_handles_them() -> None:
    command_id = send("NewKind")
    with worker_process("orders", "--name=old", COMMANDBUS_TEST_OLD_CODE="1"):
        wait_until(lambda: "RELEASED" in [row.event_type for row in audit_trail("orders", command_id)])
        with worker_process("orders", "--name=new"):
            wait_until(lambda: status(command_id) == "COMPLETED")
    assert reload(command_id).attempts == 1
    assert CommandType.objects.get(command_type="NewKind").unhandled_since is None


def test_a_type_that_nobody_handles_goes_to_troubleshooting_after_the_grace_period() -> None:
    nobodys, ours = send("Nobodys"), send("PlaceOrder")
    with worker_process("orders", COMMANDBUS_TEST_SETTINGS=IMPATIENT):
        wait_until(lambda: status(nobodys) == "IN_TROUBLESHOOTING_QUEUE")
        wait_until(lambda: status(ours) == "COMPLETED")
    command = reload(nobodys)
    assert (command.attempts, command.last_error_code) == (0, "NO_HANDLER")
    events = [row.event_type for row in audit_trail("orders", nobodys)]
    assert events[:3] == ["SENT", "RECEIVED", "RELEASED"]  # it was not sent there at once
    assert events[-1] == "MOVED_TO_TROUBLESHOOTING_QUEUE"


def test_the_grace_period_counts_from_when_it_was_first_missed() -> None:
    bus = PostgresTransitions("default")
    send("Nobodys")
    [first] = bus.receive("orders", qty=1, vt=30)
    assert bus.unhandled("orders", [first.lease]) == {first.command.command_id: "PENDING"}
    since = CommandType.objects.get(command_type="Nobodys").unhandled_since
    second = send("Nobodys")
    [received] = bus.receive("orders", qty=1, vt=30)
    bus.unhandled("orders", [received.lease])
    assert CommandType.objects.get(command_type="Nobodys").unhandled_since == since
    third = send("Nobodys")
    [received] = bus.receive("orders", qty=1, vt=30)
    assert bus.unhandled("orders", [received.lease], grace=0) == {third: "IN_TROUBLESHOOTING_QUEUE"}
    assert status(second) == "PENDING"


def test_a_worker_leaves_alone_what_only_another_handles() -> None:
    """It has met it once, and from then on does not take it out of the other's hands."""
    mine, yours = HandlerRegistry(), HandlerRegistry()
    mine.register(Handler("orders", "Mine", lambda command, context: None, transactional=False))
    yours.register(Handler("orders", "Yours", lambda command, context: time.sleep(0.001), transactional=False))
    with running_worker(yours, name="yours", concurrency=1), running_worker(mine, name="mine", concurrency=1):
        wait_until(lambda: Node.objects.count() == 2)
        send_many("orders", "Yours", 1000)
        wait_until(lambda: Command.objects.filter(status="COMPLETED").count() == 1000)
    assert Audit.objects.filter(event_type="RELEASED").count() < 200


def test_a_worker_that_was_silent_for_a_while_does_not_cost_its_commands_the_grace_period() -> None:
    """Twice, and long apart: the grace period counts from its last sign of life, not from the first time."""
    bus = PostgresTransitions("default")
    handling = uuid4()
    nodes.register(
        "default", node_id=handling, name="w", role="worker", domains=["orders"], handled_types={"orders": ["T"]}
    )

    def unhandled() -> str:
        send("T")
        [received] = bus.receive("orders", qty=1, vt=30)
        [new_status] = bus.unhandled("orders", [received.lease]).values()
        PgmqClient().purge("orders__commands")
        return new_status

    Node.objects.filter(node_id=handling).update(heartbeat_at=ago(61))
    assert unhandled() == "PENDING"
    CommandType.objects.filter(command_type="T").update(unhandled_since=ago(7 * 24 * 3600))
    assert unhandled() == "PENDING"
    nodes.heartbeat("default", handling)
    assert unhandled() == "PENDING"
    assert CommandType.objects.get(command_type="T").unhandled_since is None
    Node.objects.filter(node_id=handling).update(heartbeat_at=ago(301))
    CommandType.objects.filter(command_type="T").update(unhandled_since=ago(301))
    assert unhandled() == "IN_TROUBLESHOOTING_QUEUE"


def ago(seconds: float) -> datetime:
    return timezone.now() - timedelta(seconds=seconds)
