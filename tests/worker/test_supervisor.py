"""Processes that are started, replaced and ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from django.core.management import call_command

from commandbus import NewCommand, audit_trail, nodes, pause_domain, send_command, send_commands
from commandbus.models import Audit, Command, Node, Suspect
from commandbus.testing.time import advance
from commandbus.transitions import PostgresTransitions
from commandbus.worker.board import Board
from commandbus.worker.options import WorkerOptions
from commandbus.worker.reports import Death, Reports
from commandbus.worker.supervisor import FIRST_PAUSE, LONG_LIFE_SECONDS, LONGEST_PAUSE, Child, Supervisor
from tests.helpers import (
    PATIENCE,
    WAITING_SESSIONS,
    barrier,
    libpq_parameters,
    reload,
    send,
    status,
    wait_until,
    worker_process,
)

pytestmark = pytest.mark.django_db(transaction=True)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_several_processes_share_the_work() -> None:
    with worker_process("orders", "--processes=2", "--name=many", "--concurrency=1") as worker:
        wait_until(lambda: Node.objects.count() == 2)
        with barrier() as gate:
            send_commands("orders", [NewCommand("SendMail", uuid4(), {"barrier": gate.key}) for _ in range(2)])
            wait_until(lambda: gate.arrived() == 2)  # neither waits behind the other
        wait_until(lambda: Command.objects.filter(status="COMPLETED").count() == 2)
        worker.end()
    assert set(Node.objects.values_list("name", flat=True)) == {"many-1", "many-2"}
    assert set(Command.objects.values_list("node_id", flat=True)) == set(Node.objects.values_list("node_id", flat=True))
    assert not Node.objects.filter(stopped_at=None).exists()


def test_a_node_that_was_asked_to_stop_ends_what_it_runs_and_is_not_replaced() -> None:
    with worker_process("orders", "--processes=2", "--name=asked", "--concurrency=1", "--vt=3") as worker:
        wait_until(lambda: Node.objects.count() == 2)
        first, second = Node.objects.order_by("name")
        with barrier() as gate:
            send_commands("orders", [NewCommand("SendMail", uuid4(), {"barrier": gate.key}) for _ in range(2)])
            wait_until(lambda: gate.arrived() == 2)
            assert nodes.ask_to_stop("default", first.node_id, operator="kim", reason="too old")
            assert not nodes.ask_to_stop("default", first.node_id)  # once is enough
        wait_until(lambda: Command.objects.filter(status="COMPLETED").count() == 2)
        wait_until(lambda: Node.objects.get(pk=first.pk).stopped_at is not None)
        wait_until(lambda: not exists(first.pid))
        late = send("SendMail")
        wait_until(lambda: status(late) == "COMPLETED")
        assert reload(late).node_id == second.node_id
        assert Node.objects.count() == 2
        assert nodes.ask_to_stop("default", second.node_id, operator="kim")
        assert worker.wait(PATIENCE) == 0  # nobody is left, so the supervisor ends too
    assert Node.objects.count() == 2
    assert not nodes.ask_to_stop("default", second.node_id)
    audit = Audit.objects.filter(event_type="NODE_STOP_REQUESTED").order_by("audit_id")
    assert [(row.domain, row.details_json) for row in audit] == [
        ("orders", {"operator": "kim", "reason": reason, "node": node.name, "node_id": str(node.node_id)})
        for node, reason in ((first, "too old"), (second, None))
    ]


def test_until_empty_also_works_off_suspects_and_what_they_send() -> None:
    suspect = send("Chain", length=3)
    dead = uuid4()
    PostgresTransitions("default").receive("orders", qty=1, vt=30, node_id=dead)
    advance("orders", 31)
    call_command("commandbus_worker", "orders", "--until-empty", "--concurrency=2")
    assert status(suspect) == "COMPLETED"
    assert Command.objects.filter(status="COMPLETED").count() == 3


def test_until_empty_also_works_off_what_a_suspect_sends_that_outlasts_the_others() -> None:
    with barrier(1) as others, barrier(2) as alone:
        send("Chain", length=3, barrier=alone.key)
        PostgresTransitions("default").receive("orders", qty=1, vt=30, node_id=uuid4())
        advance("orders", 31)
        send("SendMail", barrier=others.key)
        with worker_process("orders", "--until-empty") as worker:
            wait_until(lambda: others.arrived() and alone.arrived())
            others.open()
            wait_until(lambda: Node.objects.get(role="worker").stopped_at is not None)
            alone.open()
            assert worker.wait(PATIENCE) == 0
    assert Command.objects.filter(status="COMPLETED").count() == 4


def test_until_empty_also_works_off_what_a_process_sends_that_is_replaced() -> None:
    with barrier() as gate:
        send("Chain", length=3, barrier=gate.key)
        with worker_process("orders", "--until-empty", "--max-commands=1") as worker:
            wait_until(gate.arrived)
            wait_until(lambda: Node.objects.filter(stopped_at__isnull=False).exists())  # the replacement found nothing
            gate.open()
            assert worker.wait(PATIENCE) == 0
    assert Command.objects.filter(status="COMPLETED").count() == 3


def test_until_empty_also_works_off_what_a_node_leaves_that_was_asked_to_stop() -> None:
    with barrier() as gate:
        send("Chain", length=3, barrier=gate.key)
        with worker_process("orders", "--until-empty", "--processes=2", "--concurrency=1", "--vt=3") as worker:
            wait_until(gate.arrived)
            wait_until(lambda: Node.objects.filter(stopped_at__isnull=False).count() == 1)  # it has found nothing
            [busy] = Node.objects.filter(stopped_at=None)
            assert nodes.ask_to_stop("default", busy.node_id)
            wait_until(lambda: "worker.asked_to_stop" in worker.output())
            gate.open()
            assert worker.wait(PATIENCE) == 0
    assert Command.objects.filter(status="COMPLETED").count() == 3


def test_until_empty_ends_though_a_suspect_cannot_be_run() -> None:
    suspect = send("Chain", length=1)
    PostgresTransitions("default").receive("orders", qty=1, vt=30, node_id=uuid4())
    advance("orders", 31)
    PostgresTransitions("default").receive("orders", qty=1, vt=30, node_id=uuid4())
    assert Suspect.objects.count() == 1
    pause_domain("orders")
    with worker_process("orders", "--until-empty") as worker:
        assert worker.wait(PATIENCE) == 0
    assert status(suspect) == "PENDING"


def test_a_process_is_replaced_after_so_many_commands() -> None:
    send_commands("orders", [NewCommand("SendMail", uuid4(), {}) for _ in range(25)])
    with worker_process("orders", "--max-commands=10") as worker:
        wait_until(lambda: Command.objects.filter(status="COMPLETED").count() == 25)
        worker.end()
    assert worker.returncode == 0
    assert Node.objects.count() >= 3
    assert set(Command.objects.values_list("attempts", flat=True)) == {1}


def test_a_process_that_takes_too_much_memory_is_replaced() -> None:
    with worker_process("orders", "--max-memory=1") as worker:
        wait_until(lambda: Node.objects.count() >= 2)
        output = worker.end()
    assert "why=memory" in output


def test_the_replacement_starts_while_the_old_process_finishes() -> None:
    with barrier() as gate, worker_process("orders", "--max-commands=1") as worker:
        slow = send("PlaceOrder", barrier=gate.key)
        wait_until(gate.arrived)
        quick = send("PlaceOrder")
        wait_until(lambda: status(quick) == "COMPLETED")
        assert status(slow) == "IN_PROGRESS"
        gate.open()
        wait_until(lambda: status(slow) == "COMPLETED")
        worker.end()


def test_a_process_that_dies_is_replaced() -> None:
    with worker_process("orders") as worker:
        wait_until(lambda: Node.objects.count() == 1)
        os.kill(Node.objects.get().pid, signal.SIGKILL)
        wait_until(lambda: Node.objects.count() == 2)
        output = worker.end()
    assert "process.died" in output
    assert worker.returncode == 0


def test_the_pause_before_the_next_process_grows_until_one_lives_long() -> None:
    supervisor = Supervisor(WorkerOptions(domains=("orders",)))
    [place] = supervisor._places
    pauses = []
    for _ in range(10):
        place.child = Child(Dead(), uuid4(), Board.private(1))  # type: ignore[arg-type]
        supervisor._bury(place.child)
        assert place.start_at is not None
        pauses.append(round(place.start_at - time.monotonic(), 1))
    assert pauses[0] == FIRST_PAUSE
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE
    place.child = Child(Dead(), uuid4(), Board.private(1), started_at=-2 * LONG_LIFE_SECONDS)  # type: ignore[arg-type]
    supervisor._bury(place.child)
    assert round((place.start_at or 0) - time.monotonic(), 1) == FIRST_PAUSE


class Dead:
    exitcode, pid, name = -9, 1, "dead"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once_and_nobody_is_suspected(number: signal.Signals) -> None:
    with barrier() as gate, worker_process("orders", "--vt=3600") as worker:
        command_id = send("PlaceOrder", barrier=gate.key)
        wait_until(gate.arrived)
        worker.send_signal(number)
        time.sleep(0.5)  # a person's second thought; any time will do
        assert worker.poll() is None
        worker.send_signal(number)
        wait_until(lambda: not any(exists(node.pid) for node in Node.objects.all()))
        gate.open()
        worker.wait(PATIENCE)
    assert worker.returncode == 1
    assert status(command_id) == "PENDING"
    assert not Suspect.objects.exists()
    assert [row.event_type for row in audit_trail("orders", command_id)] == ["SENT", "RECEIVED", "RELEASED"]


def test_an_interrupt_from_the_keyboard_reaches_all_of_them_and_is_graceful() -> None:
    with barrier() as gate, worker_process("orders") as worker:
        command_id = send("PlaceOrder", barrier=gate.key)
        wait_until(gate.arrived)
        worker.signal_all(signal.SIGINT)
        gate.open()
        worker.wait(PATIENCE)
    assert worker.returncode == 0
    assert status(command_id) == "COMPLETED"


def test_processes_whose_supervisor_was_killed_end_gracefully() -> None:
    with barrier() as gate, worker_process("orders") as worker:
        command_id = send("PlaceOrder", barrier=gate.key)
        wait_until(gate.arrived)
        worker.kill()
        worker.wait()
        gate.open()
        wait_until(lambda: status(command_id) == "COMPLETED")
        wait_until(lambda: Node.objects.get().stopped_at is not None)


def test_a_death_is_reported_when_the_database_is_there_again() -> None:
    reports = Reports({"orders": "default"})
    command_id, node_id = send("PlaceOrder"), uuid4()
    nodes.register("default", node_id=node_id, name="n", role="worker", domains=["orders"], handled_types={})
    PostgresTransitions("default").receive("orders", qty=1, vt=3600, node_id=node_id)
    reports.add(death := Death(node_id, 1, {}, killed=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PostgresTransitions, "_call", _unreachable)
        reports.run_once()
    assert reload(command_id).lease_read_ct is not None
    death.due_at = 0
    reports.run_once()
    assert reload(command_id).lease_read_ct is None
    assert reports._deaths == [death]  # once more, for what was still under way
    death.due_at = 0
    reports.run_once()
    assert reports._deaths == []


def _unreachable(*_: object) -> None:
    from django.db import OperationalError

    raise OperationalError("nobody is there")


def test_changed_code_is_loaded_by_new_processes(tmp_path: Path) -> None:
    """In a project of its own, under DEBUG."""
    code = tmp_path / "fresh" / "handlers.py"
    code.parent.mkdir()
    (code.parent / "__init__.py").touch()
    settings = "from tests.settings import *\nDEBUG = True\nINSTALLED_APPS = [*INSTALLED_APPS, 'fresh']\n"
    (tmp_path / "fresh_settings.py").write_text(settings)
    handler = (
        "from commandbus import command_handler\n\n"
        "@command_handler('orders', 'Fresh')\ndef fresh(command, context):\n    return {'version': %d}\n"
    )
    code.write_text(handler % 1)
    place = {
        "DJANGO_SETTINGS_MODULE": "fresh_settings",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with worker_process("orders", **place) as worker:
        first = send_command("orders", "Fresh", uuid4(), {})
        wait_until(lambda: status(first) == "COMPLETED")
        code.write_text(handler % 2)
        os.utime(code, (time.time() + 5, time.time() + 5))
        wait_until(lambda: Node.objects.count() == 2)
        wait_until(lambda: Node.objects.filter(stopped_at=None).count() == 1)
        second = send_command("orders", "Fresh", uuid4(), {})
        wait_until(lambda: status(second) == "COMPLETED")
        output = worker.end()
    assert "code.changed" in output
    assert [(reload(c).reply or {})["data"] for c in (first, second)] == [{"version": 1}, {"version": 2}]
    with worker_process("orders", "--no-reload", **place) as worker:
        wait_until(lambda: Node.objects.filter(stopped_at=None).count() == 1)
        code.write_text(handler % 3)
        third = send_command("orders", "Fresh", uuid4(), {})
        wait_until(lambda: status(third) == "COMPLETED")
        assert "code.changed" not in worker.end()


def test_a_database_that_does_not_answer_keeps_no_signal_from_the_processes() -> None:
    with worker_process("orders") as worker, psycopg.connect(**libpq_parameters()) as other:
        wait_until(lambda: Node.objects.count() == 1)
        other.execute("LOCK TABLE command_bus_suspect IN ACCESS EXCLUSIVE MODE")
        wait_until(lambda: _waits_for(other))
        worker.end()
        other.rollback()
    assert worker.returncode == 0


def _waits_for(other: psycopg.Connection[Any]) -> bool:
    row = other.execute(WAITING_SESSIONS).fetchone()
    return row is not None and row[0] > 0


def test_a_handler_that_ends_the_process_with_a_friendly_exit_code_is_found_out() -> None:
    killer = send("Exit")
    with worker_process("orders", "--vt=3600"):
        wait_until(lambda: status(killer) == "IN_TROUBLESHOOTING_QUEUE")
    assert reload(killer).last_error_code == "WORKER_CRASHED"


def test_a_process_that_dies_of_what_it_receives_is_told_from_one_that_dies_of_what_it_runs() -> None:
    """Nobody was running. The first deaths are nobody's fault; then all that it held runs alone."""
    supervisor = Supervisor(WorkerOptions(domains=("orders",)))
    [place] = supervisor._places
    for _ in range(3):
        place.child = Child(Dead(), uuid4(), Board.private(1))  # type: ignore[arg-type]
        supervisor._bury(place.child)
    started = [death.started["orders"] for death in supervisor._reports._deaths]
    assert started[:2] == [[], []]
    assert started[2] != []
