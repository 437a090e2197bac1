from __future__ import annotations

import signal
import threading
import time
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from django.db import connections

from commandbus import (
    CommandBus,
    NewCommand,
    PermanentCommandError,
    RetryPolicy,
    audit_trail,
    send_command,
    send_commands,
)
from commandbus.exceptions import ConfigurationError, LeaseLostError
from commandbus.handlers import Handler, HandlerRegistry
from commandbus.models import Command, Node
from commandbus.worker.domains import CONNECTIONS_BESIDE_EXECUTORS, require_pool
from commandbus.worker.options import Ending, WorkerOptions
from commandbus.worker.worker import Worker
from tests.helpers import (
    PATIENCE,
    barrier,
    registry_with,
    reload,
    replies,
    result,
    running_worker,
    send,
    status,
    wait_until,
    worker_process,
)
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


def test_effects_and_end_commit_together_and_roll_back_together() -> None:
    good, bad, bug = send(), send(permanent=True), send(bug=True)
    with running_worker():
        wait_until(lambda: status(good) == "COMPLETED")
        wait_until(lambda: status(bad) == status(bug) == "IN_TROUBLESHOOTING_QUEUE")
    assert list(Order.objects.values_list("number", flat=True)) == [str(good)]


def test_the_traceback_begins_in_the_handler() -> None:
    command_id = send(bug=True)
    with running_worker():
        wait_until(lambda: status(command_id) == "IN_TROUBLESHOOTING_QUEUE")
    details = audit_trail("orders", command_id)[-1].details_json
    assert details is not None
    lines = details["error"]["traceback"].splitlines()
    assert "shop/handlers.py" in lines[1]
    assert lines[-1] == "RuntimeError: a bug"


def test_async_handlers_run_in_the_transaction_too() -> None:
    good, bad = send("CreateAsync"), send("CreateAsync", fail=True)
    with running_worker():
        wait_until(lambda: status(good) == "COMPLETED")
        wait_until(lambda: status(bad) == "IN_TROUBLESHOOTING_QUEUE")
    assert result(good) == {"in_transaction": True}
    assert list(Order.objects.values_list("number", flat=True)) == [str(good)]


def test_a_coroutine_past_its_timeout_is_interrupted_and_tried_again() -> None:
    slow, quick = send("CallAsync", sleep=30), send("CallAsync")
    with running_worker():
        wait_until(lambda: status(quick) == "COMPLETED")
        wait_until(lambda: status(slow) == "IN_TROUBLESHOOTING_QUEUE")
    assert reload(slow).last_error_code == "TIMEOUT"
    assert reload(slow).attempts == 3


def test_a_function_that_returns_after_its_timeout_is_tried_again() -> None:
    def sleepy(command: Any, context: Any) -> None:
        threading.Event().wait(0.05)

    handlers = registry_with(sleepy, timeout=0.01, retry_policy=RetryPolicy(max_attempts=2, backoff=(0,)))
    command_id = send_command("orders", "Test", uuid4(), {})
    with running_worker(handlers):
        wait_until(lambda: status(command_id) == "IN_TROUBLESHOOTING_QUEUE")
    assert reload(command_id).last_error_code == "TIMEOUT"


def test_a_bulk_handler_gets_many_in_one_transaction() -> None:
    ids = send_commands("orders", [NewCommand("ImportOrders", uuid4(), {}) for _ in range(120)])
    with running_worker():
        wait_until(lambda: Command.objects.filter(status="COMPLETED").count() == 120)
    assert set(Order.objects.values_list("number", flat=True)) == {str(command_id) for command_id in ids}
    assert Order.objects.count() == 120
    assert len(replies()) == 120


def test_a_bulk_handler_that_fails_runs_each_alone_and_only_the_culprit_suffers() -> None:
    send_commands("orders", [NewCommand("ImportOrders", uuid4(), {"permanent": n == 3}) for n in range(10)])
    with running_worker():
        wait_until(lambda: Command.objects.filter(status="IN_TROUBLESHOOTING_QUEUE").count() == 1)
        wait_until(lambda: Command.objects.filter(status="COMPLETED", attempts=1).count() == 9)
    assert Order.objects.count() == 9


def test_a_bulk_handler_without_a_transaction_fails_for_all_of_them() -> None:
    """It cannot be run again: its effects are outside."""
    calls = []

    def fail(commands: list[Any], context: Any) -> None:
        calls.append(len(commands))
        raise PermanentCommandError("NO")

    send_commands("orders", [NewCommand("Test", uuid4(), {}) for _ in range(5)])
    with running_worker(registry_with(fail, batch_size=10, transactional=False)):
        wait_until(lambda: Command.objects.filter(status="IN_TROUBLESHOOTING_QUEUE").count() == 5)
    assert calls == [5]


@pytest.mark.parametrize("results", [[{}, {}, {}], "no list", 7])
def test_a_bulk_handler_returns_one_result_per_command_or_none(results: Any) -> None:
    send_commands("orders", [NewCommand("Test", uuid4(), {}) for _ in range(2)])
    with running_worker(registry_with(lambda commands, context: results, batch_size=10)):
        wait_until(lambda: Command.objects.filter(status="IN_TROUBLESHOOTING_QUEUE").count() == 2)
    assert set(Command.objects.values_list("last_error_code", flat=True)) == {"INVALID_RESULT"}


def test_a_worker_for_several_domains_serves_them_all() -> None:
    handlers = HandlerRegistry()
    for domain in ("orders", "other"):
        handlers.register(Handler(domain, "Test", lambda command, context: None))
    for domain in ("orders", "other"):
        send_commands(domain, [NewCommand("Test", uuid4(), {}) for _ in range(20)])
    with running_worker(handlers, domains=("orders", "other")):
        wait_until(lambda: Command.objects.filter(status="COMPLETED").count() == 40)


def test_until_empty_ends_when_nothing_is_ready() -> None:
    send_commands("orders", [NewCommand("SendMail", uuid4(), {}) for _ in range(30)])
    delayed = send_command("orders", "SendMail", uuid4(), {}, delay=3600)
    chain = send("Chain", length=20)
    retried = send("PlaceOrder", fail_attempts=2)
    Command.objects.filter(command_id=retried).update(command_type="AtOnce")
    call_command("commandbus_worker", "orders", "--until-empty", "--concurrency=2", "--no-notify")
    assert Command.objects.filter(status="COMPLETED").count() == 30 + 20 + 1
    assert status(chain) == status(retried) == "COMPLETED"
    assert status(delayed) == "PENDING"


def test_max_commands_ends_after_that_many() -> None:
    send_commands("orders", [NewCommand("SendMail", uuid4(), {}) for _ in range(30)])
    worker = Worker(WorkerOptions(domains=("orders",), max_commands=7, concurrency=2))
    assert worker.run() is Ending.RECYCLE
    assert not threading.current_thread().name.startswith("commandbus-")  # it is the caller's again
    assert Command.objects.filter(status="COMPLETED").count() == 7
    assert Command.objects.filter(status="PENDING", attempts=0).count() == 23


def test_a_graceful_stop_finishes_what_runs_and_gives_back_the_rest() -> None:
    running, release = threading.Event(), threading.Event()

    def wait(command: Any, context: Any) -> None:
        running.set()
        release.wait(30)

    handlers = registry_with(wait)
    # The first makes the worker believe that handlers are quick, so that it fetches ahead.
    send_commands("orders", [NewCommand("Test", uuid4(), {}) for _ in range(5)])
    with running_worker(handlers, concurrency=1) as worker:
        worker._backlog._seconds = {"Test": (0.001, time.monotonic())}
        wait_until(running.is_set)
        wait_until(lambda: Command.objects.filter(lease_read_ct__isnull=False).count() == 5)
        worker.stop()
        release.set()
    assert Command.objects.filter(status="COMPLETED").count() == 1
    given_back = Command.objects.filter(status="PENDING", attempts=0, lease_read_ct=None)
    assert given_back.count() == 4
    [command, *_] = given_back
    assert [row.event_type for row in audit_trail("orders", command.command_id)] == ["SENT", "RECEIVED", "RELEASED"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_ends_gracefully_on_a_signal(number: signal.Signals) -> None:
    with barrier() as gate, worker_process("orders", "--name", "node-7") as process:
        command_id = send("PlaceOrder", barrier=gate.key)
        wait_until(gate.arrived)
        process.send_signal(number)
        gate.open()
        process.wait(PATIENCE)
        output = process.end()
    assert process.returncode == 0, output
    assert status(command_id) == "COMPLETED"
    node = Node.objects.get()
    assert (node.name, node.role, node.domains) == ("node-7", "worker", ["orders"])
    assert "PlaceOrder" in node.handled_types["orders"]
    assert node.stopped_at is not None


@pytest.mark.parametrize(("pool", "size"), [({"max_size": 5}, 5), (True, 4), ({"min_size": 6}, 6)])
def test_a_pool_that_is_too_small_is_reported_at_start(pool: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(WorkerOptions(domains=("orders",), concurrency=10))
    needed = 10 + CONNECTIONS_BESIDE_EXECUTORS
    database = SimpleNamespace(settings_dict={"OPTIONS": {"pool": pool}})
    monkeypatch.setattr("commandbus.worker.domains.connections", {"default": database})
    with pytest.raises(ConfigurationError, match=f"holds {size} connections, and this worker needs {needed}"):
        worker.run()
    database.settings_dict["OPTIONS"]["pool"] = {"max_size": needed}
    require_pool("default", 10)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "domain 'nowhere' is not registered; known: orders, other, payments, "),
        (["orders", "--concurrency=0"], "concurrency must be 1 or more, not 0"),
        (["orders", "--vt=0"], "vt must be 1 or more, not 0"),
        (["orders", "--max-commands=0"], "max_commands must be 1 or more"),
        (["orders", "--poll-interval=0"], "poll_interval must be more than 0"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: str) -> None:
    with pytest.raises(CommandError, match=words):
        call_command("commandbus_worker", *arguments)
    with pytest.raises(ConfigurationError, match="at least one domain"):
        WorkerOptions(domains=())


def test_the_bus_object_is_the_same_bus(commandbus_handlers: HandlerRegistry) -> None:
    bus = CommandBus()
    bus.register_handler("orders", "Test", lambda command, context: {"done": True}, RetryPolicy(max_attempts=2))
    first, second, third = (bus.send("orders", "Test", uuid4(), {}) for _ in range(3))
    [one] = bus.receive("orders")
    bus.complete(one, {"by": "hand"})
    with pytest.raises(LeaseLostError):
        bus.complete(one)
    [two] = bus.receive("orders", vt_seconds=60)
    bus.cancel(two)

    def work() -> None:
        bus.run_worker("orders", concurrency=1)
        connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: status(third) == "COMPLETED")
    bus.stop()
    thread.join(30)
    assert [reload(c).status for c in (first, second)] == ["COMPLETED", "CANCELED"]
    assert result(first) == {"by": "hand"}
    assert result(third) == {"done": True}
