from __future__ import annotations

import logging
from uuid import uuid4

import pytest
from django.db import connections

from commandbus import send_command
from commandbus.messages import Finish, Status
from commandbus.transitions import PostgresTransitions
from commandbus.worker import finish
from commandbus.worker.finish import Finisher
from tests.helpers import status

pytestmark = pytest.mark.django_db(transaction=True)


def test_one_outcome_that_does_not_go_through_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    ids = [send_command("orders", "SendMail", uuid4(), {}) for _ in range(3)]
    leases = [r.lease for r in PostgresTransitions("default").receive("orders", qty=3, vt=30)]
    finisher = Finisher("default")
    impossible = Finish(leases[1], Status.PENDING)  # no end: the table refuses it
    finisher.put("orders", [Finish(leases[0], Status.COMPLETED), impossible, Finish(leases[2], Status.COMPLETED)])
    with caplog.at_level(logging.ERROR, "commandbus.worker"):
        finisher.start()
        finisher.stop()
        finisher.join(30)
    assert [status(command_id) for command_id in ids] == ["COMPLETED", "IN_PROGRESS", "COMPLETED"]
    assert "finish.failed" in caplog.text


def test_many_outcomes_go_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "GROUP", 4)
    ids = [send_command("orders", "SendMail", uuid4(), {}) for _ in range(10)]
    leases = [r.lease for r in PostgresTransitions("default").receive("orders", qty=10, vt=30)]
    finisher = Finisher("default")
    finisher.put("orders", [Finish(lease, Status.COMPLETED) for lease in leases])
    finisher.stop()
    finisher.start()
    finisher.join(30)
    assert {status(command_id) for command_id in ids} == {"COMPLETED"}


def test_it_gives_up_when_the_process_ends_and_the_database_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    command_id = send_command("orders", "SendMail", uuid4(), {})
    [received] = PostgresTransitions("default").receive("orders", qty=1, vt=30)
    monkeypatch.setattr(finish, "GIVE_UP_SECONDS", -1)
    finisher = Finisher("default")
    monkeypatch.setitem(connections["default"].settings_dict, "HOST", "/nonexistent")
    finisher.put("orders", [Finish(received.lease, Status.COMPLETED)])
    finisher.stop()
    with caplog.at_level(logging.ERROR, "commandbus.worker"):
        finisher.start()
        finisher.join(30)
    assert "finish.failed" in caplog.text
    assert status(command_id) == "IN_PROGRESS"  # its lease runs out, and it comes back
