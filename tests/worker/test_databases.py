"""Workers whose domains live on two real databases."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from asgiref.sync import sync_to_async
from django.db import connections, transaction

from commandbus import (
    Context,
    NewCommand,
    Reply,
    RetryPolicy,
    audit_trail,
    pause_domain,
    reply_handler,
    resume_domain,
    send_command,
    send_command_and_wait,
    send_commands,
)
from commandbus.handlers import HandlerRegistry
from commandbus.models import Command, Node, Suspect
from commandbus.pgmq import PgmqClient
from commandbus.worker.domains import reply_queues_of
from commandbus.worker.worker import Worker
from tests.helpers import (
    BOTH,
    PATIENCE,
    barrier,
    keep,
    registry_with,
    reload,
    replies,
    result,
    running_worker,
    send,
    status,
    unreachable,
    wait_until,
    worker_process,
)
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True, databases=BOTH)

DOMAINS = {"default": "orders", "second": "archive"}
KINDS = {"orders": "PlaceOrder", "archive": "KeepOrder"}


def ended(command_id: UUID, domain: str = "archive", end: str = "COMPLETED") -> Callable[[], bool]:
    return lambda: status(command_id, domain) == end


def orders(using: str) -> list[str]:
    return sorted(Order.objects.using(using).values_list("number", flat=True))


def texts(ids: list[UUID]) -> list[str]:
    return sorted(str(command_id) for command_id in ids)


def test_one_worker_serves_the_domains_of_both_each_in_its_own_transaction() -> None:
    placed = send_commands("orders", [NewCommand("PlaceOrder", uuid4(), {}) for _ in range(30)])
    kept = send_commands("archive", [NewCommand("KeepOrder", uuid4(), {}) for _ in range(30)])
    kept += send_commands("archive", [NewCommand("KeepOrders", uuid4(), {}) for _ in range(30)])
    mailed = send_commands("archive", [NewCommand("SendMail", uuid4(), {}) for _ in range(30)])
    refused, broken = keep(refuse=True), keep(permanent=True)
    with worker_process("orders", "archive", "--name=node-7") as worker:
        wait_until(lambda: Command.objects.filter(status="COMPLETED").count() == 30)
        wait_until(lambda: Command.objects.using("second").filter(status="COMPLETED").count() == 90)
        wait_until(ended(refused, end="FAILED"))
        wait_until(ended(broken, end="IN_TROUBLESHOOTING_QUEUE"))
        worker.end()
    assert worker.returncode == 0
    assert (orders("default"), orders("second")) == (texts(placed), texts(kept))
    assert result(kept[0], "archive") == {"attempt": 1, "using": "second"}
    assert sorted(reply["command_id"] for reply in replies()) == texts(placed)
    assert sorted(reply["command_id"] for reply in replies("archive")) == texts([*kept, *mailed, refused])
    for using in BOTH:
        assert set(Command.objects.using(using).values_list("domain", "attempts")) == {(DOMAINS[using], 1)}


def test_a_node_is_registered_and_stopped_in_both() -> None:
    with worker_process("orders", "archive", "--name=node-7") as worker:
        for using in BOTH:
            wait_until(lambda u=using: Node.objects.using(u).count() == 1)  # type: ignore[misc]
        worker.end()
    here, there = (Node.objects.using(using).get() for using in BOTH)
    assert (here.node_id, here.name) == (there.node_id, "node-7")
    assert (here.domains, there.domains) == (["orders"], ["archive"])
    assert (list(here.handled_types), list(there.handled_types)) == (["orders"], ["archive"])
    assert here.stopped_at is not None
    assert there.stopped_at is not None


def test_a_worker_for_a_domain_of_the_second_needs_nothing_of_the_first() -> None:
    kept = keep()
    placed = send("PlaceOrder")
    with worker_process("archive", COMMANDBUS_TEST_DATABASE="there_is_no_such_database") as worker:
        wait_until(ended(kept))
        output = worker.end()
    assert worker.returncode == 0, output
    assert orders("second") == [str(kept)]
    assert status(placed) == "PENDING"
    assert not Node.objects.exists()


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        ("KeepOrder", "in_handler"),
        ("KeepOrder", "between_finish_and_commit"),
        ("KeepOrders", "between_finish_and_commit"),
    ],
)
def test_a_process_that_is_killed_in_a_transaction_on_the_second_loses_and_doubles_nothing(
    kind: str, point: str, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    kept = keep(kind)
    with worker_process("orders", "archive", COMMANDBUS_FAILPOINT=f"{point}:SIGKILL:{killed}") as worker:
        wait_until(killed.exists, f"the point {point}")
        wait_until(ended(kept))
        placed = send("PlaceOrder")
        wait_until(ended(placed, "orders"))
        worker.end()
    assert worker.returncode == 0
    assert (reload(kept, "archive").attempts, reload(kept, "archive").crash_count) == (1, 0)
    assert (orders("default"), orders("second")) == ([str(placed)], [str(kept)])
    assert [reply["command_id"] for reply in replies("archive")] == [str(kept)]
    assert [row.event_type for row in audit_trail("archive", kept)].count("COMPLETED") == 1
    assert not Suspect.objects.using("second").exists()


def test_another_worker_takes_over_on_the_second_when_all_processes_were_killed() -> None:
    with barrier(using="second") as gate, worker_process("orders", "archive", "--vt=1") as worker:
        kept = keep(barrier=gate.key)
        wait_until(gate.arrived)
        worker.signal_all(signal.SIGKILL)
        worker.wait()
    with worker_process("orders", "archive", "--vt=1"):
        wait_until(ended(kept))
    assert reload(kept, "archive").attempts == 1
    assert orders("second") == [str(kept)]


def test_a_killer_on_the_second_is_convicted_and_its_neighbours_in_both_complete() -> None:
    killer = keep(kill=True)
    kept = send_commands("archive", [NewCommand("KeepOrder", uuid4(), {}) for _ in range(20)])
    placed = send_commands("orders", [NewCommand("PlaceOrder", uuid4(), {}) for _ in range(20)])
    with worker_process("orders", "archive", "--vt=60"):
        wait_until(ended(killer, end="IN_TROUBLESHOOTING_QUEUE"))
        wait_until(lambda: Command.objects.filter(status="COMPLETED", attempts=1).count() == 20)
        wait_until(lambda: Command.objects.using("second").filter(status="COMPLETED", attempts=1).count() == 20)
    assert reload(killer, "archive").last_error_code == "WORKER_CRASHED"
    assert (orders("default"), orders("second")) == (texts(placed), texts(kept))


@pytest.mark.parametrize("away", BOTH)
def test_a_database_that_goes_away_does_not_hold_up_the_other(away: str) -> None:
    [there] = [using for using in BOTH if using != away]
    with worker_process("orders", "archive", "--vt=1") as worker:
        for using in BOTH:
            wait_until(lambda u=using: Node.objects.using(u).count() == 1)  # type: ignore[misc]
        delayed = send_command(DOMAINS[away], KINDS[DOMAINS[away]], uuid4(), {}, delay=1)
        with unreachable(away):
            for _ in range(2):  # one after the other, for longer than a lease
                command_id = send_command(DOMAINS[there], KINDS[DOMAINS[there]], uuid4(), {"sleep": 1})
                wait_until(ended(command_id, DOMAINS[there]))
        wait_until(ended(delayed, DOMAINS[away]))
        worker.end()
    assert worker.returncode == 0
    assert orders(away) == [str(delayed)]
    for using in BOTH:
        assert set(Command.objects.using(using).values_list("status", "attempts")) == {("COMPLETED", 1)}
        assert Node.objects.using(using).get().stopped_at is not None


def test_what_runs_on_a_database_that_goes_away_is_run_again_without_an_attempt() -> None:
    with barrier(using="second") as gate, worker_process("orders", "archive", "--vt=2"):
        kept = keep(barrier=gate.key)
        wait_until(gate.arrived)
        with unreachable("second"):
            placed = send("PlaceOrder")
            wait_until(ended(placed, "orders"))
        wait_until(ended(kept))
    assert reload(kept, "archive").attempts == 1
    assert orders("second") == [str(kept)]
    assert not Suspect.objects.using("second").exists()


def test_a_worker_can_start_and_end_while_one_of_its_databases_is_away() -> None:
    kept = keep()
    with unreachable("second"):
        with worker_process("orders", "archive") as worker:
            placed = send("PlaceOrder")
            wait_until(ended(placed, "orders"))
            output = worker.end()
        assert worker.returncode == 0, output
        assert "database.unreachable database=second" in output
    assert Node.objects.get().stopped_at is not None
    assert status(kept, "archive") == "PENDING"


def test_a_worker_serves_a_database_that_comes_only_after_its_start() -> None:
    kept = keep()
    with ExitStack() as outage:
        outage.enter_context(unreachable("second"))
        with worker_process("orders", "archive"):
            placed = send("PlaceOrder")
            wait_until(ended(placed, "orders"))
            outage.close()
            wait_until(ended(kept))
    assert Node.objects.get().node_id == Node.objects.using("second").get().node_id


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set while the worker of this process has looked everywhere and waits to be woken."""
    event, sleep = threading.Event(), Worker._sleep

    def watched(worker: Worker, seconds: float) -> None:
        if not worker._changed.is_set():
            event.set()
        sleep(worker, seconds)
        event.clear()

    monkeypatch.setattr(Worker, "_sleep", watched)
    return event


def test_an_idle_worker_is_woken_from_either_database(asleep: threading.Event) -> None:
    with running_worker(domains=("orders", "archive"), poll_interval=3600):
        for domain in ("archive", "orders", "archive", "orders"):
            wait_until(asleep.is_set)
            command_id = send_command(domain, KINDS[domain], uuid4(), {})
            wait_until(ended(command_id, domain))


def test_what_is_sent_while_one_database_is_away_need_not_wait_for_the_next_poll(asleep: threading.Event) -> None:
    with running_worker(domains=("orders", "archive"), poll_interval=3600):
        wait_until(asleep.is_set)
        with unreachable("second"):
            for _ in range(3):
                placed = send("PlaceOrder")
                wait_until(ended(placed, "orders"))
        kept = keep()
        wait_until(ended(kept))


def test_a_pause_on_the_second_holds_up_nothing_on_the_first() -> None:
    pause_domain("archive")
    kept = keep()
    with running_worker(domains=("orders", "archive")):
        placed = send("PlaceOrder")
        wait_until(ended(placed, "orders"))
        assert status(kept, "archive") == "PENDING"
        resume_domain("archive")
        wait_until(ended(kept))


def test_replies_are_handled_in_the_database_of_their_domain(commandbus_handlers: HandlerRegistry) -> None:
    @reply_handler("archive")
    def note(reply: Reply, context: Context) -> None:
        Order.objects.using(context.using).create(number=f"{reply.command_id} {reply.outcome}")

    kept = keep("SendMail")
    with running_worker(domains=("archive", *reply_queues_of(["archive"]))):
        wait_until(lambda: orders("second") == [f"{kept} SUCCESS"])
    assert replies("archive") == []


def test_a_reply_from_the_second_can_be_waited_for() -> None:
    with running_worker(domains=("archive",)):
        reply = send_command_and_wait("archive", "KeepOrder", uuid4(), {}, timeout=PATIENCE)
    assert reply.data == {"attempt": 1, "using": "second"}


def test_a_handler_cannot_send_out_of_its_transaction_to_a_domain_of_another_database() -> None:
    def forward(command: Any, context: Any) -> None:
        send_command("archive", "KeepOrder", command.command_id, {})

    handlers = registry_with(forward, retry_policy=RetryPolicy(backoff=(0,)))
    command_id = send("Test")
    with running_worker(handlers):
        wait_until(ended(command_id, "orders", "IN_TROUBLESHOOTING_QUEUE"))
    assert reload(command_id).last_error_type == "TransactionMismatchError"
    assert not Command.objects.using("second").exists()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_handler_without_a_transaction_forwards_to_another_database_once(asynchronous: bool) -> None:
    """The way from one database to the other that loses nothing: it is repeated under the same id until it is done."""

    def forward(command: Any, context: Any) -> None:
        send_command("archive", "KeepOrder", command.command_id, command.data)
        if context.attempt == 1:
            raise RuntimeError("after the send, before the end")

    async def aforward(command: Any, context: Any) -> None:
        await sync_to_async(forward)(command, context)

    function = aforward if asynchronous else forward
    handlers = registry_with(function, transactional=False, retry_policy=RetryPolicy(backoff=(0,)))
    with transaction.atomic():
        command_id = send("Test", n=1)
    with running_worker(handlers):
        wait_until(ended(command_id, "orders"))
    assert reload(command_id).attempts == 2
    assert [command.command_id for command in Command.objects.using("second").all()] == [command_id]


def test_a_database_that_takes_no_outcomes_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commandbus.worker.finish.MOST_WAITING", 20)
    monkeypatch.setattr("commandbus.worker.backlog.MOST", 10)
    PgmqClient("second").create_queue("answers")
    many = send_commands("archive", [NewCommand("SendMail", uuid4(), {}, reply_to="answers") for _ in range(100)])
    with ExitStack() as locked:
        locked.enter_context(transaction.atomic(using="second"))
        with connections["second"].cursor() as cursor:
            cursor.execute("LOCK TABLE pgmq.q_answers IN SHARE MODE")
        with running_worker(domains=("orders", "archive")) as worker:
            wait_until(lambda: worker._finishers["second"].is_behind())
            other = send_command("orders", "SendMail", uuid4(), {}, outside_transaction=True)
            wait_until(ended(other, "orders"))
            assert Command.objects.using("second").filter(domain="archive", status="PENDING").exists()
            locked.close()
            wait_until(lambda: all(ended(command_id)() for command_id in many))
