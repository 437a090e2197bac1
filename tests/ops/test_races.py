"""Two operators, or an operator and somebody else, at the same command at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

import pytest
from django.db import connection, transaction

from commandbus import CommandRefusedError, audit_trail, ops, send_command
from commandbus.messages import ErrorInfo, Failure
from commandbus.models import Command
from commandbus.transitions import PostgresTransitions
from tests.helpers import PATIENCE, WAITING_SESSIONS, replies, send, status, wait_until
from tests.ops.test_troubleshooting import ACTIONS, many_troubled, troubled

pytestmark = pytest.mark.django_db(transaction=True)

BUS = PostgresTransitions("default")
ENDS = {"retry": "PENDING", "edit": "PENDING", "cancel": "CANCELED", "complete": "COMPLETED"}


class Other(threading.Thread):
    """Somebody else, on a connection of their own."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.action = action
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.action()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        finally:
            connection.close()


@contextmanager
def waiting(action: Callable[[], object]) -> Iterator[Other]:
    """`action` has come to a lock of ours. It must be over when the block and our transaction have ended."""
    other = Other(action)
    other.start()
    wait_until(_somebody_waits, "the other one waits")
    yield other


def _somebody_waits() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(WAITING_SESSIONS)
        return bool(cursor.fetchone()[0])


@pytest.mark.parametrize("name", [*ACTIONS, "cancel_waiting"])
def test_an_act_that_had_to_wait_has_the_time_of_the_act(name: str) -> None:
    """The audit is looked through by number, so its times must follow the numbers."""
    command_id = send() if name == "cancel_waiting" else troubled()
    act = ACTIONS.get(name, lambda one: ops.cancel_waiting_many("orders", [one], "not needed"))
    with transaction.atomic():
        list(Command.objects.select_for_update().filter(command_id=command_id))
        with waiting(lambda: act(command_id)) as other:
            meanwhile = send()
    other.join(PATIENCE)
    assert other.error is None
    sent = audit_trail("orders", meanwhile)[0]
    last = audit_trail("orders", command_id)[-1]
    assert last.audit_id > sent.audit_id
    assert last.ts > sent.ts


@pytest.mark.parametrize("second", ACTIONS)
@pytest.mark.parametrize("first", ACTIONS)
def test_of_two_operators_one_wins_and_the_other_is_told(first: str, second: str) -> None:
    command_id = troubled()
    with transaction.atomic():
        ACTIONS[first](command_id)
        with waiting(lambda: ACTIONS[second](command_id)) as other:
            pass
    other.join(PATIENCE)
    assert isinstance(other.error, CommandRefusedError)
    assert f"its status is {ENDS[first]}" in str(other.error)
    assert status(command_id) == ENDS[first]
    assert len(replies()) == (1 if ENDS[first] != "PENDING" else 0)
    assert len(BUS.receive("orders", qty=10, vt=30)) == (1 if ENDS[first] == "PENDING" else 0)


@pytest.mark.parametrize("second", ACTIONS)
def test_if_the_first_operators_transaction_fails_the_second_one_wins(second: str) -> None:
    command_id = troubled()
    with transaction.atomic():
        ops.operator_complete("orders", command_id, {"never": "seen"})
        with waiting(lambda: ACTIONS[second](command_id)) as other:
            transaction.set_rollback(True)
    other.join(PATIENCE)
    assert other.error is None
    assert status(command_id) == ENDS[second]


def test_two_operators_with_the_same_commands_in_opposite_order_do_not_deadlock() -> None:
    ids = many_troubled(200)
    results: list[ops.ActionResult] = []
    start = threading.Barrier(2)

    def cancel(which: list[UUID]) -> None:
        start.wait(PATIENCE)
        results.append(ops.operator_cancel_many("orders", which, "no"))

    others = [Other(lambda: cancel(ids)), Other(lambda: cancel(ids[::-1]))]
    for other in others:
        other.start()
    for other in others:
        other.join(PATIENCE)
    assert [other.error for other in others] == [None, None]
    done = [command_id for result in results for command_id in result.done]
    assert sorted(done) == sorted(ids)
    assert len(replies()) == 200


def test_an_operator_does_not_wait_for_the_worker_that_holds_the_command() -> None:
    command_id = send()
    [received] = BUS.receive("orders", qty=1, vt=30)
    refused: list[bool] = []
    with transaction.atomic():
        BUS.fail("orders", [Failure(received.lease, ErrorInfo("Broken", "NEVER", ""))])
        other = Other(lambda: ops.operator_retry("orders", command_id))
        other.start()
        other.join(PATIENCE)
        refused.append(isinstance(other.error, CommandRefusedError))
    assert refused == [True]
    ops.operator_retry("orders", command_id)


def test_a_duplicate_sent_while_an_operator_retries_changes_nothing() -> None:
    command_id = troubled(n=1)
    with transaction.atomic():
        ops.operator_edit("orders", command_id, {"n": 2})
        other = Other(lambda: send_command("orders", "PlaceOrder", command_id, {"n": 1}))
        other.start()
        other.join(PATIENCE)
        assert not other.is_alive()
        assert other.error is None
    [received] = BUS.receive("orders", qty=10, vt=30)
    assert received.command.data == {"n": 2}


@pytest.mark.parametrize("action", ["retry", "cancel", "complete"])
def test_what_was_retried_since_it_was_chosen_is_left_alone(action: str) -> None:
    """Somebody is asked, hesitates, and says yes. Meanwhile it was retried, and has failed with another error."""
    changed, same = troubled(), troubled()
    chosen = ops.select("orders", ops.TroubleshootingFilter(error_code="NEVER"))
    ops.operator_edit("orders", changed, {"n": 2})
    [received] = BUS.receive("orders", qty=1, vt=30)
    BUS.fail("orders", [Failure(received.lease, ErrorInfo("Broken", "OTHER", ""))])
    actions: dict[str, Callable[[], ops.ActionResult]] = {
        "retry": lambda: ops.operator_retry_many("orders", chosen),
        "cancel": lambda: ops.operator_cancel_many("orders", chosen, "no"),
        "complete": lambda: ops.operator_complete_many("orders", chosen),
    }
    result = actions[action]()
    assert result.done == [same]
    assert result.refused == {changed: "it was retried since it was chosen, and has failed again"}
    assert status(changed) == "IN_TROUBLESHOOTING_QUEUE"
    assert ops.in_troubleshooting("orders", chosen).count() == 1
