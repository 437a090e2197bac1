"""Quick handlers: several commands for one executor, in one transaction where they have one."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection, transaction

from commandbus import (
    BusinessRuleError,
    Command,
    Context,
    NewCommand,
    PermanentCommandError,
    audit_trail,
    send_commands,
)
from commandbus.handlers import Handler, HandlerRegistry
from commandbus.models import Command as StoredCommand
from commandbus.policies import RetryPolicy
from tests.failpoints import GROUP_POINTS
from tests.helpers import (
    barrier,
    registry_with,
    reload,
    replies,
    running_worker,
    send_many,
    status,
    wait_until,
    worker_process,
)
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

TSQ = "IN_TROUBLESHOOTING_QUEUE"
AT_ONCE = RetryPolicy(max_attempts=3, backoff=(0,))


class Calls:
    """Of a handler that has an effect: in which transaction each command was run."""

    def __init__(self, then: Callable[[Command], None] = lambda command: None) -> None:
        self.transactions: dict[UUID, list[int]] = {}
        self.then = then

    def __call__(self, command: Command, context: Context) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_current_xact_id()::text::bigint")
            self.transactions.setdefault(command.command_id, []).append(cursor.fetchone()[0])
        Order.objects.create(number=str(command.command_id))
        self.then(command)


def work(handlers: HandlerRegistry, data: list[dict[str, Any]], **options: Any) -> list[UUID]:
    """Send, and work it all off in as few groups as possible."""
    ids = send_commands("orders", [NewCommand("Test", uuid4(), one) for one in data])
    with running_worker(handlers, quick="Test", **{"concurrency": 1, **options}):
        wait_until(lambda: not StoredCommand.objects.filter(status__in=["PENDING", "IN_PROGRESS"]).exists())
    return ids


def effects() -> set[str]:
    numbers = list(Order.objects.values_list("number", flat=True))
    assert len(numbers) == len(set(numbers))
    return set(numbers)


def events(command_id: UUID) -> list[str]:
    return [row.event_type for row in audit_trail("orders", command_id)]


def test_quick_handlers_share_a_transaction() -> None:
    calls = Calls()
    ids = work(registry_with(calls), [{}] * 5)
    assert len({tuple(xids) for xids in calls.transactions.values()}) == 1
    assert effects() == {str(command_id) for command_id in ids}
    assert Counter(reply["command_id"] for reply in replies()) == Counter(map(str, ids))
    assert all(events(command_id) == ["SENT", "RECEIVED", "COMPLETED"] for command_id in ids)


def test_a_handler_can_have_its_transaction_for_itself() -> None:
    calls = Calls()
    ids = work(registry_with(calls, share_transaction=False), [{}] * 5)
    assert len({xid for [xid] in calls.transactions.values()}) == 5
    assert effects() == {str(command_id) for command_id in ids}


def test_whoever_fails_is_judged_alone_and_takes_no_one_along() -> None:
    def fail(command: Command) -> None:
        if command.data.get("refuse"):
            raise BusinessRuleError("NO", "against the rules")
        if command.data.get("permanent"):
            raise PermanentCommandError("NEVER", "it cannot work")

    calls = Calls(fail)
    good, refused, also_good, never = work(registry_with(calls), [{}, {"refuse": 1}, {}, {"permanent": 1}])
    assert calls.transactions[good] == calls.transactions[also_good]
    assert [len(calls.transactions[command_id]) for command_id in (good, refused, never)] == [1, 2, 2]
    assert effects() == {str(good), str(also_good)}
    assert [status(command_id) for command_id in (good, refused, also_good, never)] == [
        "COMPLETED",
        "FAILED",
        "COMPLETED",
        TSQ,
    ]
    assert reload(never).attempts == 1


def test_what_fails_only_beside_others_counts_for_nothing() -> None:
    """It gets its say alone: no attempt is lost, and no trace of it remains."""

    def fail_at_first(command: Command) -> None:
        if len(calls.transactions[command.command_id]) == 1 and command.data.get("shy"):
            raise RuntimeError("not before the others")

    calls = Calls(fail_at_first)
    good, shy = work(registry_with(calls, retry_policy=AT_ONCE), [{}, {"shy": True}])
    assert effects() == {str(good), str(shy)}
    assert events(shy) == ["SENT", "RECEIVED", "COMPLETED"]
    assert reload(shy).attempts == 1


def test_a_transaction_that_is_lost_as_a_whole_is_run_again_one_by_one() -> None:
    def end_the_session(command: Command) -> None:
        if len(calls.transactions[command.command_id]) == 1 and command.data.get("last"):
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    calls = Calls(end_the_session)
    ids = work(registry_with(calls), [{}, {}, {"last": True}])
    assert effects() == {str(command_id) for command_id in ids}
    assert [len(calls.transactions[command_id]) for command_id in ids] == [2, 2, 2]
    assert len({xids[1] for xids in calls.transactions.values()}) == 3
    assert all(reload(command_id).attempts == 1 for command_id in ids)


def test_a_lease_that_was_lost_meanwhile_spoils_only_its_own_command() -> None:
    def lose(command: Command) -> None:
        if command.data.get("lose"):
            thread = threading.Thread(target=take_away, args=[command.command_id])
            thread.start()
            thread.join()

    def take_away(command_id: UUID) -> None:
        try:
            StoredCommand.objects.filter(command_id=command_id).update(lease_read_ct=1000)
        finally:
            connection.close()

    calls = Calls(lose)
    ids = send_commands("orders", [NewCommand("Test", uuid4(), {"lose": n == 1}) for n in range(3)])
    good, lost, also_good = ids
    with running_worker(registry_with(calls), quick="Test", concurrency=1):
        wait_until(lambda: status(good) == status(also_good) == "COMPLETED")
    assert effects() == {str(good), str(also_good)}
    assert status(lost) == "IN_PROGRESS"  # somebody else's


def test_after_a_group_has_failed_its_type_is_run_alone_for_a_while() -> None:
    calls = Calls(lambda command: connection.close() if len(calls.transactions) == 1 else None)
    handlers = registry_with(calls)
    send_commands("orders", [NewCommand("Test", uuid4(), {}) for _ in range(3)])
    with running_worker(handlers, quick="Test", concurrency=1) as worker:
        wait_until(lambda: Order.objects.count() == 3)
        assert worker._backlog._trust["Test"] < 2
        for _ in range(60):
            send_many("orders", "Test", 10)
        wait_until(lambda: Order.objects.count() == 603)
        assert worker._backlog._trust.get("Test", 50) > 10
    assert max(Counter(xid for xids in calls.transactions.values() for xid in xids).values()) > 1


def test_those_that_fight_for_locks_are_run_alone_for_a_while() -> None:
    def lock(command: Command) -> None:
        if len(calls.transactions[command.command_id]) == 1 and command.data.get("lock"):
            with connection.cursor() as cursor:
                cursor.execute("SET LOCAL lock_timeout = '50ms'; SELECT pg_advisory_xact_lock(1)")

    calls = Calls(lock)
    ids = send_commands("orders", [NewCommand("Test", uuid4(), {"lock": n == 1}) for n in range(3)])
    with barrier(), running_worker(registry_with(calls), quick="Test", concurrency=1) as worker:
        wait_until(lambda: {status(command_id) for command_id in ids} == {"COMPLETED"})
        assert worker._backlog._trust["Test"] < 2
    assert [len(calls.transactions[command_id]) for command_id in ids] == [1, 2, 1]


def test_commands_of_two_types_that_alternate_share_transactions_all_the_same() -> None:
    calls, others = Calls(), Calls()
    handlers = registry_with(calls)
    handlers.register(Handler("orders", "Other", others))
    send_commands("orders", [NewCommand(kind, uuid4(), {}) for _ in range(10) for kind in ("Test", "Other")])
    with running_worker(handlers, quick="Test", concurrency=2):
        wait_until(lambda: Order.objects.count() == 20)
    assert len({tuple(xids) for xids in calls.transactions.values()}) < 5


def test_a_handler_that_marks_the_transaction_for_rollback_does_not_complete() -> None:
    calls = Calls(lambda command: transaction.set_rollback(True) if command.data.get("undo") else None)
    good, undone = work(registry_with(calls, retry_policy=AT_ONCE), [{}, {"undo": True}])
    assert (status(good), status(undone)) == ("COMPLETED", TSQ)
    assert effects() == {str(good)}


def test_callbacks_of_whoever_fails_are_forgotten_and_those_of_the_others_not() -> None:
    called: list[UUID] = []

    def register(command: Command) -> None:
        transaction.on_commit(lambda: called.append(command.command_id))
        with suppress(ZeroDivisionError), transaction.atomic():
            transaction.on_commit(lambda: called.append(command.command_id))
            raise ZeroDivisionError
        if command.data.get("fail"):
            raise BusinessRuleError("NO", "against the rules")

    first, refused, third = work(registry_with(Calls(register)), [{}, {"fail": True}, {}])
    assert called == [first, third]
    assert status(refused) == "FAILED"


def test_a_callback_that_fails_after_the_commit_keeps_no_other_from_being_called() -> None:
    called: list[UUID] = []

    def register(command: Command) -> None:
        transaction.on_commit(lambda: called.append(command.command_id))
        if command.data.get("fail"):
            transaction.on_commit(lambda: 1 / 0)

    first, second, third = work(registry_with(Calls(register)), [{}, {"fail": True}, {}])
    assert called == [first, second, third]
    assert [status(command_id) for command_id in (first, second, third)] == ["COMPLETED"] * 3


@pytest.mark.parametrize("transactional", [True, False])
def test_one_that_is_slow_after_all_does_not_hold_up_the_rest_of_its_group(transactional: bool) -> None:
    def wait(command: Command, context: Context) -> None:
        if command.data.get("wait"):
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_xact_lock_shared(1)")

    handlers = registry_with(wait, transactional=transactional)
    slow, *others = send_commands("orders", [NewCommand("Test", uuid4(), {"wait": n == 0}) for n in range(6)])
    with barrier() as gate, running_worker(handlers, quick="Test"):
        wait_until(lambda: all(status(command_id) == "COMPLETED" for command_id in others))
        assert gate.arrived() == 1
        gate.open()
        wait_until(lambda: status(slow) == "COMPLETED")
    assert all(events(command_id) == ["SENT", "RECEIVED", "COMPLETED"] for command_id in [slow, *others])


def test_one_that_takes_too_long_is_written_off_and_those_of_its_transaction_run_again() -> None:
    released = threading.Event()

    def hang(command: Command) -> None:
        if command.data.get("hang"):
            released.wait(60)

    calls = Calls(hang)
    handlers = registry_with(calls, timeout=0.3, retry_policy=AT_ONCE)
    data = [{"hang": number == 2} for number in range(5)]
    ids = send_commands("orders", [NewCommand("Test", uuid4(), one) for one in data])
    try:
        with running_worker(handlers, quick="Test", concurrency=1, vt=2):
            wait_until(lambda: status(ids[2]) == TSQ)
            others = [command_id for command_id in ids if command_id != ids[2]]
            wait_until(lambda: all(status(command_id) == "COMPLETED" for command_id in others))
            released.set()
    finally:
        released.set()
    assert effects() == {str(command_id) for command_id in others}
    assert reload(ids[2]).last_error_code == "TIMEOUT"
    assert (
        max(len(calls.transactions[command_id]) for command_id in others) == 2
    )  # in the transaction that was given up


def test_a_worker_that_stops_gives_back_the_rest_of_a_group() -> None:
    started = threading.Event()

    def slow(command: Command, context: Context) -> None:
        started.set()
        time.sleep(0.3)

    ids = send_commands("orders", [NewCommand("Test", uuid4(), {}) for _ in range(20)])
    with running_worker(registry_with(slow, transactional=False), quick="Test", concurrency=1):
        assert started.wait(30)
    assert {status(command_id) for command_id in ids} == {"PENDING", "COMPLETED"}
    assert not StoredCommand.objects.exclude(lease_read_ct=None).exists()


@pytest.mark.parametrize("point", GROUP_POINTS)
def test_a_process_that_is_killed_in_a_shared_transaction(point: str, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    ids = send_commands("orders", [NewCommand("PlaceOrder", uuid4(), {}) for _ in range(100)])
    with worker_process("orders", COMMANDBUS_FAILPOINT=f"{point}:SIGKILL:{killed}"):
        wait_until(killed.exists, f"the point {point}")
        wait_until(lambda: StoredCommand.objects.filter(status="COMPLETED").count() == len(ids))
    assert effects() == {str(command_id) for command_id in ids}
    assert Counter(reply["command_id"] for reply in replies()) == Counter(map(str, ids))
    assert not StoredCommand.objects.exclude(attempts=1).exists()
