"""A process is killed at a point of its life. Nothing is lost, no effect is doubled, one reply goes out."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from uuid import UUID

import pytest

from commandbus import NewCommand, audit_trail, send_commands
from commandbus.models import Command, Suspect
from tests.failpoints import POINTS
from tests.helpers import reload, replies, send, status, wait_until, worker_process
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

MODES = [
    pytest.param(json.dumps({"MARK_IN_PROGRESS": True}), id="marked"),
    pytest.param(json.dumps({"MARK_IN_PROGRESS": False}), id="unmarked"),
]


def failpoint(point: str, path: Path, number: str = "SIGKILL") -> str:
    return f"{point}:{number}:{path}"


def check(command_id: UUID, *, effects: int) -> None:
    command = reload(command_id)
    assert (command.status, command.lease_read_ct, command.crash_count) == ("COMPLETED", None, 0)
    assert command.attempts == 1
    assert Order.objects.count() == effects
    assert [reply["command_id"] for reply in replies()] == [str(command_id)]
    assert [row.event_type for row in audit_trail("orders", command_id)].count("COMPLETED") == 1
    assert not Suspect.objects.exists()


@pytest.mark.parametrize("settings", MODES)
@pytest.mark.parametrize(
    ("kind", "point"),
    [
        *(("PlaceOrder", point) for point in POINTS),
        # Without a transaction of the handler, the finish is one of its own.
        *(("SendMail", point) for point in POINTS if point != "between_finish_and_commit"),
        *(("ImportOrders", point) for point in POINTS),
    ],
)
def test_a_process_that_is_killed(point: str, kind: str, settings: str, tmp_path: Path) -> None:
    """Its supervisor survives, gives back what it held, and starts the next."""
    killed = tmp_path / "killed"
    command_id = send(kind)
    with worker_process(
        "orders", COMMANDBUS_FAILPOINT=failpoint(point, killed), COMMANDBUS_TEST_SETTINGS=settings
    ) as worker:
        wait_until(killed.exists, f"the point {point}")
        wait_until(lambda: status(command_id) == "COMPLETED")
        worker.end()
        assert worker.returncode == 0
    check(command_id, effects=0 if kind == "SendMail" else 1)


@pytest.mark.parametrize("settings", MODES)
@pytest.mark.parametrize("point", POINTS)
def test_all_processes_are_killed(point: str, settings: str, tmp_path: Path) -> None:
    """Nobody is left to give anything back: the leases run out, and the next worker takes over."""
    stopped = tmp_path / "stopped"
    command_id = send("PlaceOrder")
    changes = {"COMMANDBUS_FAILPOINT": failpoint(point, stopped, "SIGSTOP"), "COMMANDBUS_TEST_SETTINGS": settings}
    with worker_process("orders", "--vt=1", **changes) as worker:
        wait_until(stopped.exists, f"the point {point}")
        worker.signal_all(signal.SIGKILL)
        worker.wait()
    with worker_process("orders", "--vt=1", **changes):
        wait_until(lambda: status(command_id) == "COMPLETED")
    check(command_id, effects=1)


def test_what_was_not_started_is_given_back_at_once(tmp_path: Path) -> None:
    """Long before the leases run out."""
    killed = tmp_path / "killed"
    ids = send_commands("orders", [NewCommand("PlaceOrder", UUID(int=n), {}) for n in range(10)])
    with worker_process("orders", "--vt=3600", COMMANDBUS_FAILPOINT=failpoint("after_read", killed)):
        wait_until(lambda: Command.objects.filter(status="COMPLETED").count() == len(ids))
    assert killed.exists()
    for command_id in ids:
        events = [row.event_type for row in audit_trail("orders", command_id)]
        assert events == ["SENT", "RECEIVED", "RELEASED", "RECEIVED", "COMPLETED"]
        assert reload(command_id).attempts == 1
