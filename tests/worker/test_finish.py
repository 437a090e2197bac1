from __future__ import annotations

import logging
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connections, transaction

from commandbus import send_command
from commandbus.messages import Finish, Lease, Status
from commandbus.models import Command
from commandbus.transitions import PostgresTransitions
from commandbus.worker import finish
from commandbus.worker.execute import apply
from commandbus.worker.finish import Finisher
from tests.helpers import status, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def ignore(domain: str, outcomes: Any) -> None:
    pass


def test_one_outcome_that_does_not_go_through_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    ids = [send_command("orders", "SendMail", uuid4(), {}) for _ in range(3)]
    leases = [r.lease for r in PostgresTransitions("default").receive("orders", qty=3, vt=30)]
    finisher = Finisher("default", ignore)
    impossible = Finish(leases[1], Status.PENDING)  # this is no end: the table refuses it
    finisher.put("orders", [Finish(leases[0], Status.COMPLETED), impossible, Finish(leases[2], Status.COMPLETED)])
    with caplog.at_level(logging.ERROR, "commandbus.worker"):
        finisher.start()
        finisher.stop()
        finisher.join(30)
    assert [status(command_id) for command_id in ids] == ["COMPLETED", "IN_TROUBLESHOOTING_QUEUE", "COMPLETED"]
    assert "finish.refused" in caplog.text


def test_what_the_database_never_takes_is_logged_and_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids = [send_command("orders", "SendMail", uuid4(), {}) for _ in range(2)]
    leases = [r.lease for r in PostgresTransitions("default").receive("orders", qty=2, vt=30)]
    finisher = Finisher("default", ignore)
    nonsense = Finish(Lease(ids[0], 2**70, 1), Status.COMPLETED)  # no bigint: neither finish nor fail takes it
    finisher.put("orders", [nonsense, Finish(leases[1], Status.COMPLETED)])
    finisher.start()
    finisher.stop()
    finisher.join(30)
    assert [status(command_id) for command_id in ids] == ["IN_PROGRESS", "COMPLETED"]
    assert caplog.text.count("finish.refused") == 2


def test_a_lock_on_one_command_holds_up_only_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "LOCK_TIMEOUT", "50ms")
    monkeypatch.setattr(finish, "POSTPONE_SECONDS", 0.1)
    ids = [send_command("orders", "SendMail", uuid4(), {}) for _ in range(3)]
    leases = [r.lease for r in PostgresTransitions("default").receive("orders", qty=3, vt=30)]
    told: list[UUID] = []
    finisher = Finisher("default", lambda _, outcomes: told.extend(outcome.lease.command_id for outcome in outcomes))
    with transaction.atomic():
        list(Command.objects.select_for_update().filter(command_id=ids[0]))
        finisher.put("orders", [Finish(lease, Status.COMPLETED) for lease in leases[:2]])
        finisher.start()
        wait_until(lambda: [status(c) for c in ids] == ["IN_PROGRESS", "COMPLETED", "IN_PROGRESS"])
        finisher.put("orders", [Finish(leases[2], Status.COMPLETED)])
        wait_until(lambda: status(ids[2]) == "COMPLETED")
        assert ids[0] not in told
    wait_until(lambda: status(ids[0]) == "COMPLETED")
    finisher.stop()
    finisher.join(30)
    assert set(told) == set(ids)


def test_many_locked_commands_hold_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit that this test would not survive twice."""
    monkeypatch.setattr(finish, "LOCK_TIMEOUT", "5s")
    monkeypatch.setattr(finish, "POSTPONE_SECONDS", 0.1)
    ids = [send_command("orders", "SendMail", uuid4(), {}) for _ in range(21)]
    leases = [r.lease for r in PostgresTransitions("default").receive("orders", qty=21, vt=300)]
    told: list[UUID] = []
    finisher = Finisher("default", lambda _, outcomes: told.extend(outcome.lease.command_id for outcome in outcomes))
    with transaction.atomic():
        list(Command.objects.select_for_update().filter(command_id__in=ids[:20]))
        finisher.put("orders", [Finish(lease, Status.COMPLETED) for lease in leases[:20]])
        finisher.start()
        wait_until(lambda: len(finisher._postponed) == 20, "all locked ones are postponed")
        finisher.put("orders", [Finish(leases[20], Status.COMPLETED)])
        wait_until(lambda: status(ids[20]) == "COMPLETED")
        wait_until(lambda: told == [ids[20]], "the word of it")
    wait_until(lambda: set(told) == set(ids))
    finisher.stop()
    finisher.join(30)
    assert not finisher.is_alive()
    assert {status(command_id) for command_id in ids} == {"COMPLETED"}


def test_a_locked_table_does_not_keep_the_process_from_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(finish, "LOCK_TIMEOUT", "50ms")
    monkeypatch.setattr(finish, "POSTPONE_SECONDS", 0.1)
    monkeypatch.setattr(finish, "GIVE_UP_SECONDS", 0.2)
    ids = [send_command("orders", "SendMail", uuid4(), {}) for _ in range(50)]
    leases = [r.lease for r in PostgresTransitions("default").receive("orders", qty=50, vt=300)]
    finisher = Finisher("default", ignore)
    with transaction.atomic():
        with connections["default"].cursor() as cursor:
            cursor.execute("LOCK TABLE command_bus_command IN ACCESS EXCLUSIVE MODE")
        finisher.put("orders", [Finish(lease, Status.COMPLETED) for lease in leases])
        finisher.start()
        finisher.stop()
        finisher.join(30)
        assert not finisher.is_alive()
    assert "finish.given_up domain=orders count=50" in caplog.text
    assert status(ids[0]) == "IN_PROGRESS"  # its lease runs out, and it comes back


def test_many_outcomes_go_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "GROUP", 4)
    ids = [send_command("orders", "SendMail", uuid4(), {}) for _ in range(10)]
    leases = [r.lease for r in PostgresTransitions("default").receive("orders", qty=10, vt=30)]
    groups: list[int] = []
    finisher = Finisher("default", lambda domain, outcomes: groups.append(len(outcomes)))
    finisher.put("orders", [Finish(lease, Status.COMPLETED) for lease in leases])
    finisher.stop()
    finisher.start()
    finisher.join(30)
    assert groups == [4, 4, 2]
    assert {status(command_id) for command_id in ids} == {"COMPLETED"}


def test_it_gives_up_when_the_process_ends_and_the_database_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    command_id = send_command("orders", "SendMail", uuid4(), {})
    [received] = PostgresTransitions("default").receive("orders", qty=1, vt=30)
    monkeypatch.setattr(finish, "GIVE_UP_SECONDS", -1)
    finisher = Finisher("default", ignore)
    monkeypatch.setitem(connections["default"].settings_dict, "HOST", "/nonexistent")
    finisher.put("orders", [Finish(received.lease, Status.COMPLETED)])
    finisher.stop()
    with caplog.at_level(logging.ERROR, "commandbus.worker"):
        finisher.start()
        finisher.join(30)
    assert "finish.given_up" in caplog.text
    assert status(command_id) == "IN_PROGRESS"  # its lease runs out, and it comes back


def test_it_waits_for_a_database_that_is_only_for_reading_at_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failover has led to a standby, say."""
    monkeypatch.setattr(finish, "POSTPONE_SECONDS", 0.1)
    command_id = send_command("orders", "SendMail", uuid4(), {})
    [received] = PostgresTransitions("default").receive("orders", qty=1, vt=30)
    read_only = [True, True]
    tell = Finisher._tell

    def refuse(self: Finisher, domain: str, outcomes: Any, *, wait: bool) -> None:
        if read_only:
            read_only.pop()
            with transaction.atomic(), connections["default"].cursor() as cursor:
                cursor.execute("SET TRANSACTION READ ONLY")
                apply(self.transitions, domain, outcomes)
        tell(self, domain, outcomes, wait=wait)

    monkeypatch.setattr(Finisher, "_tell", refuse)
    finisher = Finisher("default", ignore)
    finisher.put("orders", [Finish(received.lease, Status.COMPLETED)])
    finisher.start()
    wait_until(lambda: status(command_id) == "COMPLETED")
    finisher.stop()
    finisher.join(30)
    assert not read_only
