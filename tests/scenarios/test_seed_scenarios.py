"""Producer, worker process and reply consumer (seed §12.3), with both kinds of handlers."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest

from commandbus import audit_trail, ops, send_command
from tests.helpers import reload, replies, send, status, wait_until, worker_process
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("kind", ["PlaceOrder", "SendMail"])
def test_the_scenarios_of_the_seed(kind: str) -> None:
    happy = send(kind)
    recovers = send(kind, fail_attempts=2)
    permanent = send(kind, permanent=True)
    exhausted = send(kind, fail_attempts=99)
    twice = uuid4()
    for _ in range(3):
        send_command("orders", kind, twice, {"n": 1})

    with worker_process("orders", "--concurrency", "4", "--poll-interval", "0.1") as worker:
        ended = {happy: "COMPLETED", recovers: "COMPLETED", twice: "COMPLETED"}
        troubled = {permanent: "IN_TROUBLESHOOTING_QUEUE", exhausted: "IN_TROUBLESHOOTING_QUEUE"}
        for command_id, expected in {**ended, **troubled}.items():
            wait_until(lambda c=command_id, e=expected: status(c) == e, f"{expected} of {command_id}")  # type: ignore[misc]
        output = worker.end()
    assert worker.returncode == 0, output
    assert "worker.started" in output  # also in a project that configures no logging

    def events(command_id: UUID) -> list[str]:
        return [row.event_type for row in audit_trail("orders", command_id)]

    assert events(happy) == ["SENT", "RECEIVED", "COMPLETED"]
    assert events(recovers) == ["SENT", *["RECEIVED", "RETRY_SCHEDULED"] * 2, "RECEIVED", "COMPLETED"]
    assert events(permanent) == ["SENT", "RECEIVED", "MOVED_TO_TROUBLESHOOTING_QUEUE"]
    assert events(exhausted) == [
        "SENT",
        *["RECEIVED", "RETRY_SCHEDULED"] * 2,
        *["RECEIVED", "MOVED_TO_TROUBLESHOOTING_QUEUE"],
    ]
    assert events(twice) == ["SENT", "RECEIVED", "COMPLETED"]
    assert reload(permanent).last_error_code == "NEVER"
    assert reload(exhausted).attempts == 3

    outcomes = {UUID(reply["command_id"]): reply["outcome"] for reply in replies()}
    assert outcomes == dict.fromkeys(ended, "SUCCESS")
    assert len(replies()) == 3

    # The operator: one is edited into something that works, the other one is given up.
    ops.operator_edit("orders", permanent, {}, operator="mary")
    ops.operator_retry("orders", exhausted, operator="mary")
    ops.operator_retry_many("orders", [happy])  # refused, and no harm done
    with worker_process("orders", "--poll-interval", "0.1"):
        wait_until(lambda: status(permanent) == "COMPLETED", "the retried command")
        wait_until(lambda: status(exhausted) == "IN_TROUBLESHOOTING_QUEUE", "the command that fails again")
    ops.operator_cancel("orders", exhausted, "nobody needs it")
    ended |= {permanent: "COMPLETED", exhausted: "CANCELED"}
    outcomes = {UUID(reply["command_id"]): reply["outcome"] for reply in replies()}
    assert outcomes == {c: "SUCCESS" if e == "COMPLETED" else e for c, e in ended.items()}
    assert len(replies()) == 5
    if kind == "PlaceOrder":
        ended.pop(exhausted)
        assert set(Order.objects.values_list("number", flat=True)) == {str(command_id) for command_id in ended}
        assert Order.objects.count() == 4
