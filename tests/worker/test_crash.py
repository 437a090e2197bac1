"""A command that kills its process is convicted, and nobody beside it."""

from __future__ import annotations

import random
import signal
import time
from uuid import UUID, uuid4

import pytest

from commandbus import NewCommand, audit_trail, send_commands
from commandbus.models import Command, Suspect
from commandbus.transitions import PostgresTransitions
from tests.helpers import reload, replies, send, wait_until, worker_process
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


def send_neighbours(count: int, kinds: tuple[str, ...] = ("PlaceOrder", "SendMail", "ImportOrders")) -> list[UUID]:
    """Commands that may not fail once."""
    commands = [NewCommand(kinds[n % len(kinds)], uuid4(), {}) for n in range(count)]
    ids = send_commands("orders", commands)
    Command.objects.filter(command_id__in=ids).update(max_attempts=1)
    return ids


def check(killers: list[UUID], neighbours: list[UUID]) -> None:
    for killer in killers:
        command = reload(killer)
        assert (command.status, command.last_error_code) == ("IN_TROUBLESHOOTING_QUEUE", "WORKER_CRASHED")
        assert command.attempts == 0  # it never had its say
        last = audit_trail("orders", killer)[-1]
        assert last.details_json is not None
        assert (last.event_type, last.details_json["reason"]) == ("MOVED_TO_TROUBLESHOOTING_QUEUE", "WORKER_CRASHED")
    done = Command.objects.filter(command_id__in=neighbours)
    assert set(done.values_list("status", "attempts", "crash_count")) == {("COMPLETED", 1, 0)}
    orders = done.exclude(command_type="SendMail").values_list("command_id", flat=True)
    assert sorted(Order.objects.values_list("number", flat=True)) == sorted(str(command_id) for command_id in orders)
    assert sorted(reply["command_id"] for reply in replies()) == sorted(str(command_id) for command_id in neighbours)
    assert not Suspect.objects.exists()


def all_resolved() -> bool:
    return not Command.objects.filter(status__in=["PENDING", "IN_PROGRESS"]).exists()


@pytest.mark.parametrize("kind", ["PlaceOrder", "SendMail", "ImportOrders"])
def test_a_killer_is_convicted_and_its_neighbours_complete(kind: str) -> None:
    killer = send(kind, kill=True)
    neighbours = send_neighbours(60)
    with worker_process("orders", "--vt=60") as worker:
        wait_until(all_resolved)
        worker.end()
    assert worker.returncode == 0
    check([killer], neighbours)
    assert reload(killer).crash_count == 2


def test_several_killers_and_several_workers() -> None:
    neighbours = send_neighbours(50)
    killers = [send(kind, kill=True) for kind in ("PlaceOrder", "SendMail", "ImportOrders")]
    neighbours += send_neighbours(50)
    with worker_process("orders", "--processes=2", "--concurrency=4"), worker_process("orders", "--concurrency=4"):
        wait_until(all_resolved)
    check(killers, neighbours)


def test_a_killer_that_takes_its_supervisor_along_is_convicted_too() -> None:
    """Nobody sees it. Runs that vanish have a higher limit, because what has ended them all may not be the command."""
    killer = send("PlaceOrder", kill="all")
    neighbours = send_neighbours(10)
    settings = '{"CRASH_LIMIT": 1}'
    for _ in range(30):
        with worker_process("orders", "--vt=1", COMMANDBUS_TEST_SETTINGS=settings) as worker:
            wait_until(lambda: worker.poll() is not None or all_resolved())
        if all_resolved():
            break
    check([killer], neighbours)
    assert (reload(killer).crash_count, reload(killer).vanished_count) == (0, 5)


def test_an_operator_can_send_a_convicted_command_again_and_it_stays_alone() -> None:
    killer = send("PlaceOrder", kill=True)
    with worker_process("orders"):
        wait_until(all_resolved)
        [answer] = PostgresTransitions("default").operator_retry("orders", [killer], "alice", "it was the weather")
        assert answer.done
        neighbours = send_neighbours(20)
        wait_until(all_resolved)
    check([killer], neighbours)
    isolated = [
        (row.details_json or {}).get("isolated", False)
        for row in audit_trail("orders", killer)
        if row.event_type == "RECEIVED"
    ]
    assert isolated == [False, True, True, True, True]


def test_everything_completes_though_all_processes_are_killed_again_and_again() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 - pytest shows it when the test has failed
    chance = random.Random(seed)
    neighbours = send_neighbours(50)
    killers = [send("PlaceOrder", kill=True), send("SendMail", kill=True)]
    until = time.monotonic() + 60
    while time.monotonic() < until:
        neighbours += send_neighbours(50)
        with worker_process("orders", "--vt=1", "--concurrency=3", "--processes=2") as worker:
            time.sleep(chance.uniform(0, 2))  # the fault itself: a life that ends at random, every second on average
            worker.signal_all(signal.SIGKILL)
            worker.wait()
    with worker_process("orders", "--vt=1", "--concurrency=3"):
        wait_until(all_resolved)
    check(killers, neighbours)
