"""Replies that are handled: by the same worker, with the same guarantees as commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.utils import timezone

from commandbus import (
    CommandRefusedError,
    ConfigurationError,
    InvalidCommandError,
    NewCommand,
    Reply,
    audit_trail,
    get_command,
    nodes,
    ops,
    reply_handler,
    send_command,
    send_commands,
)
from commandbus.handlers import Handler, HandlerRegistry
from commandbus.install import register_domains
from commandbus.messages import Finish, Status, handling_id
from commandbus.models import Command, CommandType, Domain, UnreadableMessage
from commandbus.pgmq import PgmqClient
from commandbus.testing.time import advance
from commandbus.transitions import PostgresTransitions
from commandbus.worker.domains import reply_queues_of
from tests.failpoints import POINTS
from tests.helpers import PATIENCE, running_worker, wait_until, worker_process
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

QUEUE = "sales__replies"
BUS = PostgresTransitions("default")


def answered(**data: Any) -> UUID:
    """A command of sales to orders that has ended. Its reply waits, and tells its handler what to do."""
    command_id = send_command("orders", "Echo", uuid4(), data, reply_to=QUEUE)
    [received] = BUS.receive("orders", qty=1, vt=30)
    BUS.finish("orders", [Finish(received.lease, Status.COMPLETED, data)])
    return command_id


def handling(command_id: UUID) -> Command | None:
    """What stands for the handling of the reply to a command."""
    stored = get_command("orders", command_id)
    assert stored is not None
    assert stored.reply is not None
    return get_command(QUEUE, handling_id(Reply.from_json(stored.reply)))


def status(command_id: UUID) -> str | None:
    command = handling(command_id)
    return command.status if command else None


def effects() -> list[str]:
    return sorted(Order.objects.values_list("number", flat=True))


def test_a_reply_handler_gets_the_replies_of_commands_that_name_its_queue() -> None:
    ids = [send_command("orders", "Echo", uuid4(), {"n": n}, reply_to="sales.replies") for n in range(20)]
    other = send_command("orders", "Echo", uuid4(), {})
    with worker_process("orders", "--replies", "sales") as worker:
        wait_until(lambda: len(effects()) == 20, "the effects of all replies")
        wait_until(lambda: PgmqClient().metrics("orders__replies").queue_length == 1, "the reply that nobody handles")
        worker.end()
        assert worker.returncode == 0
    assert effects() == sorted(f"{command_id} SUCCESS" for command_id in ids)
    assert PgmqClient().metrics(QUEUE).queue_length == 0
    for command_id in ids:
        command = handling(command_id)
        assert command is not None
        assert (command.status, command.command_type, command.reply_queue) == ("COMPLETED", "orders/EchoResponse", None)
        assert command.correlation_id == command_id
        assert [e.event_type for e in audit_trail(QUEUE, command.command_id)] == ["RECEIVED", "COMPLETED"]
    assert handling(other) is None


@pytest.mark.parametrize("settings", [{"MARK_IN_PROGRESS": True}, {"MARK_IN_PROGRESS": False}], ids=str)
@pytest.mark.parametrize("point", POINTS)
def test_a_process_that_is_killed_handles_no_reply_twice(point: str, settings: Any, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    command_id = answered(n=1)
    with worker_process(
        "--replies",
        "sales",
        COMMANDBUS_FAILPOINT=f"{point}:SIGKILL:{killed}",
        COMMANDBUS_TEST_SETTINGS=json.dumps(settings),
    ):
        wait_until(killed.exists, f"the point {point}")
        wait_until(lambda: status(command_id) == "COMPLETED", "the handling")
    assert effects() == [f"{command_id} SUCCESS"]
    assert PgmqClient().metrics(QUEUE).queue_length == 0


def test_a_reply_whose_handler_fails_is_tried_again_and_then_waits_for_an_operator() -> None:
    recovers, never = answered(fail_attempts=2), answered(permanent=True)
    with running_worker(domains=(QUEUE,)):
        wait_until(lambda: status(recovers) == "COMPLETED")
        wait_until(lambda: status(never) == "IN_TROUBLESHOOTING_QUEUE")
    assert effects() == [f"{recovers} SUCCESS"]
    [troubled] = ops.list_troubleshooting(QUEUE)
    assert (troubled.command_type, troubled.last_error_code) == ("orders/EchoResponse", "NEVER")
    payload = ops.get_payload(QUEUE, troubled.command_id)
    assert payload is not None
    assert payload["command_id"] == str(never)
    with pytest.raises(CommandRefusedError, match="it is a reply, which nobody may change"):
        ops.operator_edit(QUEUE, troubled.command_id, {})
    ops.operator_retry(QUEUE, troubled.command_id, operator="mary")
    with running_worker(domains=(QUEUE,)):
        wait_until(lambda: status(never) == "IN_TROUBLESHOOTING_QUEUE")
    ops.operator_cancel(QUEUE, troubled.command_id, "of no use")
    assert status(never) == "CANCELED"
    assert PgmqClient().metrics(QUEUE).queue_length == 0  # nobody gets a reply to a reply


def test_a_reply_that_kills_its_process_is_found_out_alone() -> None:
    killer = answered(kill=True)
    others = [answered(n=n) for n in range(10)]
    with worker_process("--replies", "sales", "--vt", "2"):
        wait_until(lambda: all(status(one) == "COMPLETED" for one in others), "the innocent")
        wait_until(lambda: status(killer) == "IN_TROUBLESHOOTING_QUEUE", "the killer")
    command = handling(killer)
    assert command is not None
    assert command.last_error_code == "WORKER_CRASHED"
    assert effects() == sorted(f"{one} SUCCESS" for one in others)


def test_a_late_handler_of_a_reply_cannot_end_what_another_has_taken_over() -> None:
    answered(n=1)
    [first] = BUS.receive(QUEUE, qty=1, vt=30)
    advance(QUEUE, 60)
    [second] = BUS.receive(QUEUE, qty=1, vt=30)
    assert BUS.finish(QUEUE, [Finish(first.lease, Status.COMPLETED)]) == set()
    assert BUS.extend(QUEUE, [first.lease], 60) == {}
    assert PgmqClient().metrics(QUEUE).queue_length == 1
    assert BUS.finish(QUEUE, [Finish(second.lease, Status.COMPLETED)]) == {second.lease.command_id}
    assert PgmqClient().metrics(QUEUE).queue_length == 0


@pytest.mark.parametrize(
    "change",
    [
        {"command_id": "7"},
        {"domain": None},
        {"outcome": "MAYBE"},
        {"outcome": None},
        {"type": ""},
        {"type": None},
        {"type": 7},
        {"type": "x" * 264},
        {"domain": ["orders"]},
        {"domain": "x" * 48},
        {"correlation_id": "x"},
        None,
    ],
)
def test_what_is_no_reply_is_set_aside_and_does_not_stop_the_others(change: dict[str, Any] | None) -> None:
    command_id = answered(n=1)
    [message] = PgmqClient().read(QUEUE, vt=0, qty=1)
    strange = {"hello": "world"} if change is None else {**message.message, "command_id": str(uuid4()), **change}
    PgmqClient().send(QUEUE, {key: value for key, value in strange.items() if value is not None})
    with running_worker(domains=(QUEUE,)):
        wait_until(lambda: UnreadableMessage.objects.filter(queue_name=QUEUE).exists())
        wait_until(lambda: status(command_id) == "COMPLETED")
    assert effects() == [f"{command_id} SUCCESS"]


def test_an_envelope_that_cannot_be_read_goes_to_troubleshooting() -> None:
    command_id = answered(n=1)
    [message] = PgmqClient().read(QUEUE, vt=0, qty=1)
    PgmqClient().delete(QUEUE, [message.msg_id])
    PgmqClient().send(QUEUE, {**message.message, "completed_at": "yesterday"})
    with running_worker(domains=(QUEUE,)):
        wait_until(lambda: status(command_id) == "IN_TROUBLESHOOTING_QUEUE")
    command = handling(command_id)
    assert command is not None
    assert command.last_error_code == "INVALID_DATA"
    assert "not the envelope of a reply" in (command.last_error_msg or "")


def test_the_same_reply_in_two_messages_is_handled_once() -> None:
    command_id = answered(n=1)
    [message] = PgmqClient().read(QUEUE, vt=0, qty=1)
    PgmqClient().send(QUEUE, message.message)
    with running_worker(domains=(QUEUE,)):
        wait_until(lambda: PgmqClient().metrics(QUEUE).queue_length == 0)
    assert effects() == [f"{command_id} SUCCESS"]


def test_a_copy_of_a_reply_is_not_handled_again_after_the_first_one_was_pruned() -> None:
    command_id = answered(n=1)
    [message] = PgmqClient().read(QUEUE, vt=0, qty=1)
    with running_worker(domains=(QUEUE,)):
        wait_until(lambda: status(command_id) == "COMPLETED")
    assert BUS.prune_commands(QUEUE, timezone.now(), 10) == 1
    copy = PgmqClient().send(QUEUE, message.message)
    assert BUS.receive(QUEUE, qty=10, vt=30) == []
    assert PgmqClient().archived(QUEUE, copy) == message.message
    assert not UnreadableMessage.objects.exists()
    assert effects() == [f"{command_id} SUCCESS"]


def test_an_idle_worker_is_woken_by_a_reply() -> None:
    with running_worker(domains=("orders",)), running_worker(domains=(QUEUE,), poll_interval=2 * PATIENCE) as worker:
        for _ in range(3):
            wait_until(lambda: is_idle(worker.node_id), "an idle worker for replies")
            before = len(effects())
            send_command("orders", "Echo", uuid4(), {}, reply_to=QUEUE)
            wait_until(lambda b=before: len(effects()) == b + 1, "the effect")  # type: ignore[misc]


def is_idle(node_id: UUID) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM command_bus_idle_worker WHERE node_id = %s", [node_id])
        return bool(cursor.fetchone()[0])


def test_a_bulk_handler_gets_a_list_of_replies() -> None:
    send_commands("orders", (NewCommand("Echo", uuid4(), {"n": n}, QUEUE) for n in range(10)))
    received = BUS.receive("orders", qty=10, vt=30)
    BUS.finish("orders", [Finish(one.lease, Status.COMPLETED, one.command.data) for one in received])
    sizes: list[list[int]] = []
    handlers = HandlerRegistry()

    def note(replies: list[Reply], context: Any) -> None:
        sizes.append(sorted(reply.data["n"] for reply in replies))

    handlers.register(Handler("sales", "*", note, batch_size=10, replies=True))
    with running_worker(handlers, domains=(QUEUE,)):
        wait_until(lambda: sum(map(len, sizes)) == 10)
    assert sizes == [list(range(10))]


def test_in_a_shared_queue_each_domains_handler_gets_its_own(settings: Any, commandbus_handlers: Any) -> None:
    settings.COMMANDBUS = {"DOMAINS": ["orders", "other"], "REPLY_QUEUE": "answers"}
    commandbus_handlers.replace_with(HandlerRegistry())
    got: list[tuple[str, str]] = []
    reply_handler("orders")(lambda reply, context: got.append(("orders", reply.domain)))
    reply_handler("other")(lambda reply, context: got.append(("other", reply.domain)))
    assert reply_queues_of(["orders", "other"]) == ("answers",)
    assert "answers" in register_domains("default")
    same_id = uuid4()  # in both domains: the handling of one must not hide that of the other
    for domain in ("orders", "other"):
        send_command(domain, "X", same_id, {})
        [received] = BUS.receive(domain, qty=1, vt=30)
        BUS.finish(domain, [Finish(received.lease, Status.COMPLETED)])
    with running_worker(commandbus_handlers, domains=("answers",)):
        wait_until(lambda: len(got) == 2)
    assert sorted(got) == [("orders", "orders"), ("other", "other")]
    Domain.objects.all().delete()


def note_domain(reply: Reply, context: Any) -> None:
    Order.objects.create(number=reply.domain)


@pytest.fixture
def shared(settings: Any, commandbus_handlers: Any) -> HandlerRegistry:
    """Two domains share a reply queue; only the replies of one have a handler here."""
    settings.COMMANDBUS = {"DOMAINS": ["orders", "other"], "REPLY_QUEUE": "answers"}
    commandbus_handlers.replace_with(HandlerRegistry())
    reply_handler("orders")(note_domain)
    register_domains("default")
    for domain in ("orders", "other"):
        send_command(domain, "X", uuid4(), {})
        [received] = BUS.receive(domain, qty=1, vt=30)
        BUS.finish(domain, [Finish(received.lease, Status.COMPLETED)])
    return commandbus_handlers  # type: ignore[no-any-return]


def test_in_a_shared_queue_the_only_handler_does_not_get_the_replies_of_others(shared: HandlerRegistry) -> None:
    with running_worker(shared, domains=("answers",)):
        wait_until(lambda: CommandType.objects.filter(domain="answers", unhandled_since__isnull=False).exists())
        wait_until(lambda: effects() == ["orders"])
    [left] = Command.objects.filter(domain="answers", status="PENDING")
    assert left.command_type == "other/XResponse"


def test_in_a_shared_queue_a_reply_waits_for_the_worker_that_handles_its_domain(shared: HandlerRegistry) -> None:
    nodes.register(
        "default",
        node_id=uuid4(),
        name="new",
        role="worker",
        domains=["answers"],
        handled_types={"answers": ["orders", "other"]},
    )
    Domain.objects.filter(name="answers").update(unknown_type_grace=0)  # nobody else would be waited for
    with running_worker(shared, domains=("answers",)) as worker:
        wait_until(lambda: Command.objects.filter(command_type="other/XResponse", status="PENDING").exists())
        wait_until(lambda: effects() == ["orders"])
        wait_until(lambda: worker._fetcher._elsewhere.get("answers") == ["other"], "it leaves them alone")
    assert not Command.objects.filter(status="IN_TROUBLESHOOTING_QUEUE").exists()
    assert not CommandType.objects.filter(unhandled_since__isnull=False).exists()


def test_a_reply_that_python_cannot_hold_costs_no_worker(shared: HandlerRegistry) -> None:
    [message] = [m for m in PgmqClient().read("answers", vt=0, qty=2) if m.message["domain"] == "orders"]
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pgmq.send('answers', jsonb_set(%s::jsonb, '{data}', jsonb_build_object("
            " 'n', repeat('9', 5000)::numeric)) || jsonb_build_object('command_id', %s::text))",
            [json.dumps(message.message), str(uuid4())],
        )
    with running_worker(shared, domains=("answers",)):
        wait_until(lambda: Command.objects.filter(last_error_code="INVALID_DATA").exists())
        wait_until(lambda: effects() == ["orders"])


def test_a_reply_queue_cannot_have_the_name_of_a_domain(settings: Any, commandbus_handlers: Any) -> None:
    settings.COMMANDBUS = {"DOMAINS": ["orders", "other"], "REPLY_QUEUE": "sales"}
    assert Domain.objects.get(name="sales").replies is False
    with pytest.raises(ConfigurationError, match="is 'sales', which is also a domain"):
        register_domains("default")
    with pytest.raises(Exception, match="cannot be both a domain and the name of a reply queue"), transaction.atomic():
        BUS._call("SELECT commandbus.register_domain('sales', replies => true)", [])


@pytest.mark.parametrize("queue", ["answers", "all__replies", "a" * 47])
def test_a_shared_queue_is_handled_in_one_database(queue: str, settings: Any) -> None:
    shared = {"DOMAINS": ["orders"], "REPLY_QUEUE": queue}
    settings.COMMANDBUS = {**shared, "DATABASES": {"sales": "second"}}
    with pytest.raises(ConfigurationError, match=f"set COMMANDBUS\\['DATABASES'\\]\\['{queue}'\\] = 'second'"):
        reply_queues_of(["sales"])
    settings.COMMANDBUS = {**shared, "DATABASES": {"sales": "second", queue: "second"}}
    assert reply_queues_of(["sales"]) == (queue,)


def test_a_worker_for_replies_needs_a_handler() -> None:
    with pytest.raises(
        ConfigurationError, match=r"nobody handles the replies of domain 'orders'.* handler: payments, sales"
    ):
        reply_queues_of(["orders"])
    with pytest.raises(CommandError, match="@reply_handler"):
        call_command("commandbus_worker", "--replies", "orders")
    with pytest.raises(CommandError, match="needs at least one domain"):
        call_command("commandbus_worker")


def test_two_reply_handlers_of_one_domain_are_an_error(commandbus_handlers: HandlerRegistry) -> None:
    with pytest.raises(ConfigurationError, match="has two handlers"):
        reply_handler("sales")(lambda reply, context: None)


def test_no_command_can_be_sent_to_a_reply_queue() -> None:
    with transaction.atomic():
        with pytest.raises(InvalidCommandError, match="is a reply queue"):
            send_command(QUEUE, "X", uuid4(), {})
        assert not Command.objects.exists()  # the transaction goes on
    with pytest.raises(InvalidCommandError, match="stands for a reply queue"):
        BUS.send(QUEUE, [NewCommand("X", uuid4(), {})])


@pytest.mark.parametrize("name", ["x__replies", "x__commands", "x__events", "x__events_dlq"])
def test_a_domain_cannot_have_the_name_of_a_queue(name: str, settings: Any) -> None:
    from commandbus import conf

    settings.COMMANDBUS = {"DOMAINS": [name]}
    assert "it is the name of a queue" in conf.problems()[0]
    settings.COMMANDBUS = {}
    with pytest.raises(Exception, match="is not valid"), transaction.atomic():
        BUS._call("SELECT commandbus.register_domain(%s)", [name])


def test_an_applications_test_runs_reply_handlers_on_its_own_connection(commandbus_run: Any) -> None:
    with transaction.atomic():
        command_id = send_command("orders", "Echo", uuid4(), {}, reply_to=QUEUE)
        assert commandbus_run("orders") == 1
        assert commandbus_run(QUEUE) == 1
        assert effects() == [f"{command_id} SUCCESS"]
