"""A session keeps the plans of its functions. Those made while tables were empty must be good when they are not.

No test here asserts a time: they count the rows that were read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection
from django.utils import timezone

from commandbus import (
    BatchCommand,
    NewCommand,
    add_to_batch,
    get_batch,
    get_command,
    list_commands,
    nodes,
    open_batch,
    ops,
    seal_batch,
    send_command,
    send_commands,
)
from commandbus.messages import ErrorInfo, Failure, Finish, ReceivedCommand, Status
from commandbus.models import Batch, Command, Node, UnreadableMessage
from commandbus.pgmq import PgmqClient
from commandbus.replies import _ReplyWait
from commandbus.transitions import PostgresTransitions
from tests.helpers import rows_read, send, send_many
from tests.plans import BELIEFS, believing, reading

pytestmark = pytest.mark.django_db

CALLS = 10  # PostgreSQL looks at the parameters of the first five, and then keeps one plan for all
ERROR = ErrorInfo("E", "E", "e")

QUEUE, ARCHIVE = "pgmq.q_orders__commands", "pgmq.a_orders__commands"
TABLES = (
    "command_bus_command",
    "command_bus_tombstone",
    "command_bus_payload_archive",
    "command_bus_suspect",
    "command_bus_batch",
    QUEUE,
    ARCHIVE,
)
ROWS = 1000

Action = Callable[[PostgresTransitions, list[ReceivedCommand]], Any]

ACTIONS: dict[str, Action] = {
    "receive": lambda bus, received: None,
    "finish": lambda bus, received: bus.finish("orders", [Finish(r.lease, Status.COMPLETED) for r in received]),
    "retry": lambda bus, received: bus.fail("orders", [Failure(r.lease, ERROR, 3600) for r in received]),
    "troubleshoot": lambda bus, received: bus.fail("orders", [Failure(r.lease, ERROR) for r in received]),
    "release": lambda bus, received: bus.release("orders", [r.lease for r in received], 3600),
    "extend": lambda bus, received: bus.extend("orders", [r.lease for r in received], 3600),
    "unhandled": lambda bus, received: bus.unhandled("orders", [r.lease for r in received], 0),
    "cancel": lambda bus, received: bus.cancel("orders", [r.command.command_id for r in received]),
    "operator_retry": lambda bus, received: _troubled(bus, received, bus.operator_retry),
    "operator_edit": lambda bus, received: _troubled(
        bus, received, lambda domain, ids: bus.operator_edit(domain, {one: {} for one in ids})
    ),
    "payloads": lambda bus, received: bus.payloads("orders", [r.command.command_id for r in received]),
    "send_again": lambda bus, received: send_commands(
        "orders", [NewCommand("PlaceOrder", r.command.command_id, {}) for r in received]
    ),
    "add_to_batch_again": lambda bus, received: _add_to_batch_twice(),
    "spark_judge": lambda bus, received: _judge([r.command.command_id for r in received]),
    "operator_complete": lambda bus, received: _troubled(bus, received, bus.operator_complete),
    "node_died": lambda bus, received: bus.node_died("orders", _node(), [(0, 2**60)]),
    "receive_suspect": lambda bus, received: _suspect(bus),
    "receive_canceled_suspect": lambda bus, received: _canceled_suspect(bus, received),
    "receive_unreadable": lambda bus, received: _unreadable(bus),
    "receive_replies": lambda bus, received: _replies(bus),
    "get_command": lambda bus, received: [get_command("orders", r.command.command_id) for r in received],
    "these": lambda bus, received: len(Command.objects.these("orders", [r.command.command_id for r in received])),
    "wait_for_reply": lambda bus, received: _find_and_read(received[0].command.command_id),
    "batch_with_on_complete": lambda bus, received: _get_seal_and_repair(
        bus, open_batch("orders", on_complete=BatchCommand("PlaceOrder", uuid4(), {}))
    ),
    "groups": lambda bus, received: _troubled(bus, received, lambda domain, ids: ops.groups(domain)),
    "prune": lambda bus, received: _prune(bus, received),
}

# What is read by design. The leases of a node are looked for in the whole queue; of the suspects there is no index; and
# a prune begins with the oldest.
WALKS = {
    "node_died": [QUEUE],
    "receive_suspect": [QUEUE, "command_bus_suspect"],
    "receive_canceled_suspect": [QUEUE, *["command_bus_suspect"] * 2],
    "prune": ["command_bus_command"],
}


def _troubled(bus: PostgresTransitions, received: list[ReceivedCommand], action: Callable[..., Any]) -> None:
    bus.fail("orders", [Failure(r.lease, ERROR) for r in received])
    action("orders", [r.command.command_id for r in received])


def _suspect(bus: PostgresTransitions) -> None:
    bus.node_died("orders", _node(), [(0, 2**60)])
    assert bus.receive_suspect("orders", vt=30, node_id=_node())


def _canceled_suspect(bus: PostgresTransitions, received: list[ReceivedCommand]) -> None:
    bus.node_died("orders", _node(), [(0, 2**60)])
    bus.cancel("orders", [r.command.command_id for r in received])
    assert not bus.receive_suspect("orders", vt=30, node_id=_node())


def _unreadable(bus: PostgresTransitions) -> None:
    PgmqClient().send("orders__commands", {"command_id": str(uuid4())})
    assert bus.receive("orders", qty=1000, vt=30) == []
    assert UnreadableMessage.objects.exists()


def _replies(bus: PostgresTransitions) -> None:
    send_command("payments", "CapturePayment", uuid4(), {})
    bus.finish("payments", [Finish(r.lease, Status.COMPLETED) for r in bus.receive("payments", qty=1000, vt=30)])
    assert len(bus.receive("payments__replies", qty=1000, vt=3600)) == 1


def _add_to_batch_twice() -> None:
    commands = [BatchCommand("PlaceOrder", uuid4(), {})]
    batch_id = open_batch("orders")
    assert [add_to_batch("orders", batch_id, commands) for _ in range(2)] == [1, 0]


def _judge(ids: list[UUID]) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT is_new, problem FROM commandbus.spark_judge('orders', %s, %s, %s, NULL, NULL, NULL, NULL)",
            [[str(one) for one in ids], ["PlaceOrder"] * len(ids), ["{}"] * len(ids)],
        )
        assert cursor.fetchall() == [(False, None)] * len(ids)


def _find_and_read(command_id: UUID) -> None:
    waiting = _ReplyWait(command_id, 1, None)
    assert waiting._places("default") == [("default", "orders")]
    waiting.domain = "orders"
    assert waiting.read(connection) == ("IN_PROGRESS", None)


def _get_seal_and_repair(bus: PostgresTransitions, batch_id: UUID) -> None:
    assert get_batch("orders", batch_id) is not None
    bus.repair_batch("orders", batch_id)
    seal_batch("orders", batch_id)


def _prune(bus: PostgresTransitions, received: list[ReceivedCommand]) -> None:
    bus.finish("orders", [Finish(r.lease, Status.COMPLETED) for r in received])
    assert bus.prune_commands("orders", timezone.now() + timedelta(days=1), 10) == len(received)


def _node() -> UUID:
    return Node.objects.get().node_id


@pytest.mark.parametrize("belief", BELIEFS)
@pytest.mark.parametrize("name", ACTIONS)
def test_a_function_reads_no_rows_but_those_it_is_for(name: str, belief: str) -> None:
    bus = PostgresTransitions("default")

    def act() -> None:
        ids = [send("PlaceOrder"), send("PlaceOrder")]
        received = bus.receive("orders", qty=1000, vt=3600, node_id=_node())
        assert [one.command.command_id for one in received] == ids
        ACTIONS[name](bus, received)

    with believing(belief, _fill, TABLES):
        nodes.register("default", node_id=uuid4(), name="n", role="worker", domains=["orders"], handled_types={})
        for _ in range(CALLS):
            act()
            _forget_the_queue()
        _fill()
        with reading(TABLES) as read:
            act()
        read.subtract({table: ROWS * times for table, times in Counter(WALKS.get(name)).items()})
        assert {table: read[table] for table in TABLES if read[table] >= 60} == {}
        # It has every id, but no way to find one. A prune goes from type to type.
        assert (read["ix_command_bus_command_type"] > 0) is (name == "prune")


def _fill() -> None:
    """Rows that no action is for in every table, and messages in the queue of which none is ready."""
    send_many("orders", "PlaceOrder", ROWS)
    Batch.objects.bulk_create(Batch(batch_id=uuid4(), domain="orders", status="PENDING") for _ in range(ROWS))
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pgmq.archive('orders__commands', ARRAY(SELECT msg_id FROM pgmq.q_orders__commands)),"
            " pgmq.send_batch('orders__commands', ARRAY(SELECT '{}'::jsonb FROM generate_series(1, %s)), 3600)",
            [ROWS],
        )
        cursor.execute(
            "INSERT INTO command_bus_tombstone (domain, command_id, content_hash, unique_globally, pruned_at)"
            " SELECT unnest(ARRAY['orders', 'payments__replies']), gen_random_uuid(), '', false, now()"
            " FROM generate_series(1, %s)",
            [ROWS],
        )
        cursor.execute(
            "WITH archived AS ("
            " INSERT INTO command_bus_payload_archive (domain, command_id, payload_json, archived_at)"
            " SELECT domain, command_id, '{}', now() FROM command_bus_command WHERE domain = 'orders')"
            " INSERT INTO command_bus_suspect (id, domain, command_id, msg_id, since)"
            " SELECT id, 'other', command_id, msg_id, now() FROM command_bus_command"
        )


def _forget_the_queue() -> None:
    """What is in the queue is not the question here."""
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM pgmq.q_orders__commands")
        cursor.execute("DELETE FROM command_bus_suspect")
    Command.objects.filter(status="IN_PROGRESS").update(status="PENDING", lease_read_ct=None, lease_expires_at=None)


def test_few_that_wait_are_found_among_many_that_do_not() -> None:
    send_many("orders", "PlaceOrder", 3000)
    Command.objects.update(status="COMPLETED")
    _forget_the_queue()
    running, waiting = send("PlaceOrder"), send("PlaceOrder")
    PostgresTransitions("default").receive("orders", qty=1, vt=30)
    before = rows_read("command_bus_command")
    assert [one.command_id for one in list_commands("orders", status=Status.PENDING)] == [waiting]
    assert [one.command_id for one in list_commands("orders", status=Status.IN_PROGRESS)] == [running]
    assert rows_read("command_bus_command") - before < 60


def test_many_that_wait_are_met_soon() -> None:
    send_many("orders", "PlaceOrder", 3000)
    with connection.cursor() as cursor:
        cursor.execute("SELECT commandbus.live_rows('orders', 3000), commandbus.live_rows('orders', 2999)")
        all_rows, too_many = cursor.fetchone()
        cursor.execute("ANALYZE command_bus_command")
    assert sorted(all_rows) == sorted(Command.objects.filter(domain="orders").values_list("id", flat=True))
    assert too_many is None
    before = rows_read("command_bus_command")
    assert len(list_commands("orders", status=Status.PENDING, limit=10)) == 10
    assert rows_read("command_bus_command") - before < 60
