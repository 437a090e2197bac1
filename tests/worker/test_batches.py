"""Workers complete batches, also when processes are killed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from django.db import InterfaceError, OperationalError, connection

from commandbus import BatchCommand, BatchStatus, create_batch, ops, wait_for_batch
from commandbus.folding import fold_batches
from commandbus.models import Command
from commandbus.worker import folder
from tests.batches.helpers import batch, counts, events, finish, receive, recount, some
from tests.helpers import (
    PATIENCE,
    barrier,
    libpq_parameters,
    registry_with,
    reload,
    running_worker,
    send,
    status,
    wait_until,
    worker_process,
)

pytestmark = pytest.mark.django_db(transaction=True)


def create(*kinds: tuple[int, str, dict[str, Any]]) -> tuple[UUID, UUID]:
    """A batch of so many of each type with these data, and the id of its on_complete command."""
    callback = BatchCommand("SendMail", uuid4(), {})
    commands = [command for count, kind, data in kinds for command in some(count, kind, **data)]
    return create_batch("orders", commands, on_complete=callback), callback.command_id


def completed(command_id: UUID) -> bool:
    return Command.objects.filter(command_id=command_id, status="COMPLETED").exists()


def check(batch_id: UUID, callback: UUID) -> None:
    assert counts(batch_id) == recount(batch_id)
    assert events(batch_id) == ["BATCH_SEALED", "BATCH_STARTED", "BATCH_COMPLETED"]
    assert status(callback) == "COMPLETED"


def test_a_worker_completes_a_batch_and_handles_its_on_complete_command() -> None:
    batch_id, callback = create((30, "PlaceOrder", {}), (30, "SendMail", {}), (30, "ImportOrders", {}))
    with running_worker():
        wait_until(lambda: completed(callback))
    check(batch_id, callback)
    assert batch(batch_id).status is BatchStatus.COMPLETED


def test_a_batch_with_all_kinds_of_ends() -> None:
    batch_id, callback = create(
        (20, "PlaceOrder", {}),
        (3, "PlaceOrder", {"refuse": True}),
        (3, "PlaceOrder", {"permanent": True}),
        (3, "SendMail", {"fail_attempts": 1}),
    )
    with running_worker():
        wait_until(lambda: counts(batch_id) == (29, 23, 3, 0, 3))
        assert not batch(batch_id).is_complete
        ops.operator_cancel_many("orders", ops.troubled_in("orders", batch_id), "no use")
        wait_until(lambda: completed(callback))
    check(batch_id, callback)
    assert counts(batch_id) == (29, 23, 3, 3, 0)


def test_nobody_holds_a_lock_on_the_batch_while_a_handler_runs() -> None:
    batch_id, callback = create((1, "PlaceOrder", {"barrier": 1}))
    with barrier() as gate, running_worker():
        wait_until(gate.arrived)
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '2s'")
            cursor.execute("SELECT batch_id FROM command_bus_batch WHERE batch_id = %s FOR UPDATE", [batch_id])
            assert cursor.fetchone() == (batch_id,)
            cursor.execute("RESET lock_timeout")
        assert batch(batch_id).status is BatchStatus.IN_PROGRESS
        gate.open()
        wait_until(lambda: completed(callback))
    check(batch_id, callback)


def test_until_empty_means_the_on_complete_command_too() -> None:
    batch_id, callback = create((50, "SendMail", {}))
    with worker_process("orders", "--until-empty", "--processes=2") as worker:
        worker.wait(PATIENCE)
    check(batch_id, callback)


def test_until_empty_looks_once_more_after_the_last_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may complete a batch, which sends something, between a look at the queue and one at the counts."""
    batch_id, callback = create((1, "SendMail", {}))
    finish(receive())
    with psycopg.connect(**libpq_parameters()) as other:
        other.execute("SELECT commandbus.fold_batches()")

        def commit_and_fold(using: str, domains: Iterable[str]) -> bool:
            other.commit()
            return folder.fold_rest(using, domains)

        monkeypatch.setattr("commandbus.worker.worker.fold_rest", commit_and_fold)
        with running_worker(until_empty=True) as worker:
            wait_until(worker._stopping.is_set)
    check(batch_id, callback)


def test_a_fold_that_fails_is_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id, callback = create((1, "SendMail", {}))
    failures = iter([OperationalError("away"), InterfaceError("away"), ZeroDivisionError()])
    real = fold_batches

    def fold(using: str) -> int:
        if (error := next(failures, None)) is not None:
            raise error
        return real(using)

    monkeypatch.setattr(folder, "fold_batches", fold)
    with running_worker():
        wait_until(lambda: completed(callback))
    check(batch_id, callback)


def test_leases_are_kept_while_a_fold_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    folding, done = threading.Event(), threading.Event()

    def fold(using: str) -> int:
        folding.set()
        done.wait(PATIENCE)
        return 0

    monkeypatch.setattr(folder, "fold_batches", fold)
    command_id = send("PlaceOrder", barrier=1)
    with barrier() as gate, running_worker(vt=1):
        wait_until(gate.arrived)
        assert folding.wait(PATIENCE)
        first = reload(command_id).lease_expires_at
        assert first is not None
        wait_until(lambda: (reload(command_id).lease_expires_at or first) > first)
        gate.open()
        wait_until(lambda: status(command_id) == "COMPLETED")
        done.set()
    assert reload(command_id).attempts == 1


def test_a_handler_knows_its_batch() -> None:
    seen: list[UUID | None] = []
    batch_id = create_batch("orders", some(1, "Test"))
    with running_worker(registry_with(lambda command, context: seen.append(command.batch_id))):
        wait_for_batch("orders", batch_id, PATIENCE)
    assert seen == [batch_id]


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        ("PlaceOrder", "in_handler"),
        ("PlaceOrder", "between_finish_and_commit"),
        ("SendMail", "before_finish"),
        ("ImportOrders", "after_commit"),
    ],
)
def test_a_process_is_killed_in_the_midst_of_a_batch(point: str, kind: str, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    batch_id, callback = create((20, kind, {}))
    with worker_process("orders", COMMANDBUS_FAILPOINT=f"{point}:SIGKILL:{killed}"):
        wait_until(killed.exists, f"the point {point}")
        wait_until(lambda: completed(callback))
    check(batch_id, callback)


@pytest.mark.parametrize("point", ["before_fold", "after_fold"])
def test_all_processes_are_killed_around_the_fold_that_completes(point: str, tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    batch_id, callback = create((5, "PlaceOrder", {}))
    changes = {"COMMANDBUS_FAILPOINT": f"{point}:SIGSTOP:{stopped}"}
    with worker_process("orders", "--vt=1", **changes) as worker:
        wait_until(stopped.exists, f"the point {point}")
        worker.signal_all(signal.SIGKILL)
        worker.wait()
    assert batch(batch_id).is_complete == (point == "after_fold")
    with worker_process("orders", "--vt=1"):
        wait_until(lambda: completed(callback))
    check(batch_id, callback)


def test_what_cannot_be_looked_at_may_have_something_to_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not folder.fold_rest("default", ["orders"])

    def away(using: str) -> int:
        raise OperationalError("away")

    create((1, "SendMail", {}))
    monkeypatch.setattr(folder, "fold_batches", away)
    assert folder.fold_rest("default", ["orders"])


def test_until_empty_does_not_wait_for_the_batches_of_other_domains() -> None:
    theirs = create_batch("sales", some(1))
    with psycopg.connect(**libpq_parameters()) as other:
        other.execute("SELECT FROM command_bus_batch WHERE batch_id = %s FOR UPDATE", [theirs])
        with running_worker(until_empty=True) as worker:
            wait_until(worker._stopping.is_set)


def test_until_empty_leaves_a_batch_that_somebody_has_locked_to_others(caplog: pytest.LogCaptureFixture) -> None:
    locked, _ = create((1, "SendMail", {}))
    _, callback = create((1, "SendMail", {}))
    with psycopg.connect(**libpq_parameters()) as other:
        other.execute("SELECT FROM command_bus_batch WHERE batch_id = %s FOR UPDATE", [locked])
        with running_worker(until_empty=True) as worker:
            wait_until(worker._stopping.is_set)
    assert status(callback) == "COMPLETED"
    assert "fold.postponed" in caplog.text
    assert not batch(locked).is_complete
