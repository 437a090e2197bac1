"""One contract for the bus in memory and the bus on PostgreSQL (seed §12.1, without and with a database)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection, transaction

from commandbus.api import audit_trail, get_command
from commandbus.exceptions import (
    BusinessRuleError,
    CommandCanceled,
    InvalidCommandError,
    PermanentCommandError,
    TransientCommandError,
    UnknownDomainError,
    UnknownQueueError,
)
from commandbus.handlers import Handler, HandlerRegistry
from commandbus.messages import Command, ErrorInfo, Failure, Finish, NewCommand, Reply, Status
from commandbus.models import Domain
from commandbus.pgmq.client import PgmqClient
from commandbus.policies import RetryPolicy
from commandbus.testing import InMemoryBus, run_pending
from commandbus.testing.time import advance
from commandbus.transitions import PostgresTransitions, Transitions

DOMAIN = "orders"
ERROR = ErrorInfo("Boom", "BOOM", "it went wrong")


class Setup(ABC):
    """What the contract needs to know beside the transitions themselves."""

    bus: Transitions
    using: str | None

    @abstractmethod
    def advance(self, seconds: float) -> None: ...

    @abstractmethod
    def command(self, command_id: UUID) -> Any: ...

    @abstractmethod
    def events(self, command_id: UUID) -> list[str]: ...

    @abstractmethod
    def replies(self) -> list[dict[str, Any]]: ...

    @abstractmethod
    def put_raw(self, message: Any) -> None: ...

    @abstractmethod
    def archived(self) -> list[str]:
        """The ids in messages that were set aside."""

    @abstractmethod
    def pause(self) -> None: ...


class Memory(Setup):
    using = None

    def __init__(self, mark_in_progress: bool) -> None:
        self.bus = self.memory = InMemoryBus(DOMAIN, mark_in_progress=mark_in_progress)

    def advance(self, seconds: float) -> None:
        self.memory.advance(seconds)

    def command(self, command_id: UUID) -> Any:
        return self.memory.commands[(DOMAIN, command_id)]

    def events(self, command_id: UUID) -> list[str]:
        return [event.value for event, _ in self.command(command_id).audit]

    def replies(self) -> list[dict[str, Any]]:
        return [m.message for m in self.memory.pgmq.read(f"{DOMAIN}__replies", vt=0, qty=100)]

    def put_raw(self, message: Any) -> None:
        self.memory.pgmq.send(f"{DOMAIN}__commands", message)

    def archived(self) -> list[str]:
        return [m.message["command_id"] for m in self.memory.pgmq._queues[f"{DOMAIN}__commands"].archive.values()]

    def pause(self) -> None:
        self.memory.paused.add(DOMAIN)


class Postgres(Setup):
    using = "default"

    def __init__(self, mark_in_progress: bool) -> None:
        self.bus = PostgresTransitions("default")
        Domain.objects.filter(name=DOMAIN).update(mark_in_progress=mark_in_progress)

    def advance(self, seconds: float) -> None:
        advance(DOMAIN, seconds)

    def command(self, command_id: UUID) -> Any:
        return get_command(DOMAIN, command_id)

    def events(self, command_id: UUID) -> list[str]:
        return [row.event_type for row in audit_trail(DOMAIN, command_id)]

    def replies(self) -> list[dict[str, Any]]:
        return [m.message for m in PgmqClient().read(f"{DOMAIN}__replies", vt=0, qty=100)]

    def put_raw(self, message: Any) -> None:
        PgmqClient().send(f"{DOMAIN}__commands", message)

    def archived(self) -> list[str]:
        with connection.cursor() as cursor:
            cursor.execute("SELECT message ->> 'command_id' FROM pgmq.a_orders__commands")
            return [command_id for (command_id,) in cursor.fetchall()]

    def pause(self) -> None:
        Domain.objects.filter(name=DOMAIN).update(paused=True)


@pytest.fixture(
    params=[
        pytest.param((Memory, True), id="memory"),
        pytest.param((Memory, False), id="memory-unmarked"),
        pytest.param((Postgres, True), id="postgres", marks=pytest.mark.django_db),
        pytest.param((Postgres, False), id="postgres-unmarked", marks=pytest.mark.django_db),
    ]
)
def setup(request: pytest.FixtureRequest) -> Setup:
    kind, mark_in_progress = request.param
    if kind is Postgres:
        request.getfixturevalue("db")
    made: Setup = kind(mark_in_progress)
    return made


def new(data: dict[str, Any] | None = None, **more: Any) -> NewCommand:
    return NewCommand("Ship", uuid4(), data or {"n": 1}, **more)


def handle(setup: Setup, function: Any, *, policy: RetryPolicy | None = None, **options: Any) -> int:
    handlers = HandlerRegistry()
    handlers.register(Handler(DOMAIN, "Ship", function, policy, **options))
    return run_pending(setup.bus, DOMAIN, using=setup.using, handlers=handlers)


def test_sending_twice_sends_once(setup: Setup) -> None:
    command = new({"a": 1, "b": [1, 2]})
    again = NewCommand("Ship", command.command_id, {"b": [1, 2], "a": 1})
    assert setup.bus.send(DOMAIN, [command]) == {command.command_id: "SENT"}
    assert setup.bus.send(DOMAIN, [again, again]) == {command.command_id: "DUPLICATE"}
    assert len(setup.bus.receive(DOMAIN, qty=10, vt=30)) == 1
    assert setup.events(command.command_id) == ["SENT", "RECEIVED"]


@pytest.mark.parametrize("other", [("Ship", {"n": 2}), ("Return", {"n": 1})])
def test_other_content_under_a_known_id_is_a_conflict_and_nothing_is_sent(setup: Setup, other: Any) -> None:
    first, innocent = new(), new()
    setup.bus.send(DOMAIN, [first])
    changed = NewCommand(other[0], first.command_id, other[1])
    assert setup.bus.send(DOMAIN, [innocent, changed]) == {first.command_id: "CONFLICT"}
    assert [r.command.data for r in setup.bus.receive(DOMAIN, qty=10, vt=30)] == [{"n": 1}]


def test_two_contents_under_one_id_in_one_call_conflict(setup: Setup) -> None:
    first = new()
    twin = NewCommand("Ship", first.command_id, {"n": 2})
    assert setup.bus.send(DOMAIN, [first, twin]) == {first.command_id: "CONFLICT"}
    assert setup.bus.receive(DOMAIN, qty=10, vt=30) == []


def test_an_unknown_domain_is_an_error_that_names_the_known_ones(setup: Setup) -> None:
    with pytest.raises(UnknownDomainError, match=r"'nowhere' is not registered; known: .*orders"):
        setup.bus.send("nowhere", [new()])


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"command_type": ""}, InvalidCommandError),
        ({"delay": -5.0}, InvalidCommandError),
        ({"data": {"text": "x" * 2**21}}, InvalidCommandError),
        ({"reply_to": "nowhere"}, UnknownQueueError),
    ],
)
def test_what_cannot_be_sent_is_refused(setup: Setup, wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error), transaction.atomic() if setup.using else nullcontext():
        setup.bus.send(DOMAIN, [new(), new()._replace(**wrong)])
    assert setup.bus.receive(DOMAIN, qty=10, vt=30) == []


def test_data_that_json_cannot_hold_is_refused(setup: Setup) -> None:
    with pytest.raises(InvalidCommandError, match="is a set"):
        setup.bus.send(DOMAIN, [NewCommand("Ship", uuid4(), {"tags": {1, 2}})])


def test_a_delayed_command_waits(setup: Setup) -> None:
    now, soon, later = new(), new(delay=10), new(delay=60)
    setup.bus.send(DOMAIN, [later, now, soon])
    assert [r.command.command_id for r in setup.bus.receive(DOMAIN, qty=10, vt=300)] == [now.command_id]
    setup.advance(11)
    assert [r.command.command_id for r in setup.bus.receive(DOMAIN, qty=10, vt=300)] == [soon.command_id]
    setup.advance(50)
    assert [r.command.command_id for r in setup.bus.receive(DOMAIN, qty=10, vt=300)] == [later.command_id]


def test_a_handler_gets_the_command_and_its_result_is_the_reply(setup: Setup) -> None:
    correlation_id = uuid4()
    command = new({"n": 7}, correlation_id=correlation_id)
    setup.bus.send(DOMAIN, [command])
    seen = []

    def ship(command: Any, context: Any) -> dict[str, Any]:
        seen.append((command, context.attempt, context.max_attempts))
        return {"shipped": command.data["n"]}

    assert handle(setup, ship) == 1
    [(got, attempt, max_attempts)] = seen
    assert (got.command_id, got.command_type, got.domain) == (command.command_id, "Ship", DOMAIN)
    assert (got.correlation_id, got.reply_to, got.data) == (correlation_id, "orders__replies", {"n": 7})
    assert (attempt, max_attempts) == (1, 3)
    stored = setup.command(command.command_id)
    assert stored.status == Status.COMPLETED
    [reply] = setup.replies()
    assert Reply.from_json(reply) == Reply.from_json(stored.reply)
    completed_at = reply.pop("completed_at")
    assert completed_at
    assert reply == {
        "command_id": str(command.command_id),
        "correlation_id": str(correlation_id),
        "domain": DOMAIN,
        "type": "ShipResponse",
        "outcome": "SUCCESS",
        "data": {"shipped": 7},
        "error": None,
    }
    assert setup.events(command.command_id) == ["SENT", "RECEIVED", "COMPLETED"]


def test_transient_failures_follow_the_backoff_and_then_succeed(setup: Setup) -> None:
    command = new()
    setup.bus.send(DOMAIN, [command])
    attempts = []

    def flaky(command: Any, context: Any) -> None:
        attempts.append(context.attempt)
        if context.attempt < 3:
            raise TransientCommandError("BANK_DOWN", "try later")

    policy = RetryPolicy(backoff=(10, 60, 300))
    assert handle(setup, flaky, policy=policy) == 1
    assert setup.command(command.command_id).status == Status.PENDING
    setup.advance(9)
    assert handle(setup, flaky, policy=policy) == 0
    setup.advance(2)
    assert handle(setup, flaky, policy=policy) == 1
    setup.advance(11)
    assert handle(setup, flaky, policy=policy) == 0
    setup.advance(50)
    assert handle(setup, flaky, policy=policy) == 1
    assert attempts == [1, 2, 3]
    assert setup.command(command.command_id).status == Status.COMPLETED
    assert setup.events(command.command_id) == [
        "SENT",
        *["RECEIVED", "RETRY_SCHEDULED"] * 2,
        *["RECEIVED", "COMPLETED"],
    ]
    assert len(setup.replies()) == 1


@pytest.mark.parametrize(
    ("error", "deliveries", "code"),
    [
        (PermanentCommandError("NO_SUCH_ACCOUNT", "who?"), 1, "NO_SUCH_ACCOUNT"),
        (TransientCommandError("BANK_DOWN", "still"), 3, "BANK_DOWN"),
        (RuntimeError("a bug"), 3, "RuntimeError"),
    ],
)
def test_permanent_or_exhausted_goes_to_troubleshooting_without_a_reply(
    setup: Setup, error: Exception, deliveries: int, code: str
) -> None:
    command = new()
    setup.bus.send(DOMAIN, [command])

    def fail(command: Any, context: Any) -> None:
        raise error

    ran = 0
    for _ in range(5):
        ran += handle(setup, fail)
        setup.advance(1000)
    stored = setup.command(command.command_id)
    assert ran == deliveries
    assert stored.status == Status.IN_TROUBLESHOOTING_QUEUE
    assert (stored.last_error_type, stored.last_error_code) == (type(error).__name__, code)
    assert setup.events(command.command_id)[-1] == "MOVED_TO_TROUBLESHOOTING_QUEUE"
    assert setup.replies() == []


@pytest.mark.parametrize(
    ("error", "status"),
    [(BusinessRuleError("NO", "too poor"), "FAILED"), (CommandCanceled("OFF", "not now"), "CANCELED")],
)
def test_a_handler_that_decides_against_it_ends_the_command_with_a_reply(
    setup: Setup, error: Exception, status: str
) -> None:
    command = new()
    setup.bus.send(DOMAIN, [command])

    def refuse(command: Any, context: Any) -> None:
        raise error

    handle(setup, refuse)
    assert setup.command(command.command_id).status == status
    assert setup.events(command.command_id) == ["SENT", "RECEIVED", status]
    [reply] = setup.replies()
    assert reply["outcome"] == status
    assert reply["error"]["code"] == error.args[0]
    assert reply["error"]["message"] == error.args[1]
    assert reply["error"]["class"] == type(error).__name__


@pytest.mark.parametrize("result", ["text", [1], {"when": {1, 2}}, 0])
def test_a_result_that_is_no_json_object_is_a_permanent_error(setup: Setup, result: Any) -> None:
    command = new()
    setup.bus.send(DOMAIN, [command])
    handle(setup, lambda command, context: result)
    stored = setup.command(command.command_id)
    assert (stored.status, stored.last_error_code) == (Status.IN_TROUBLESHOOTING_QUEUE, "INVALID_RESULT")


def test_a_type_without_a_handler_goes_to_troubleshooting(setup: Setup) -> None:
    command = new()
    setup.bus.send(DOMAIN, [command])
    run_pending(setup.bus, DOMAIN, using=setup.using, handlers=HandlerRegistry())
    stored = setup.command(command.command_id)
    assert (stored.status, stored.last_error_code) == (Status.IN_TROUBLESHOOTING_QUEUE, "NO_HANDLER")


def test_operator_retry_runs_it_again_with_all_attempts(setup: Setup) -> None:
    command = in_troubleshooting(setup)
    [answer] = setup.bus.operator_retry(DOMAIN, [command.command_id], "alice", "the bank is back")
    assert answer.done
    assert handle(setup, lambda command, context: {"attempt": context.attempt}) == 1
    stored = setup.command(command.command_id)
    assert stored.status == Status.COMPLETED
    assert stored.reply["data"] == {"attempt": 1}
    assert setup.events(command.command_id)[-3:] == ["OPERATOR_RETRY", "RECEIVED", "COMPLETED"]


def test_operator_edit_runs_it_again_with_other_data(setup: Setup) -> None:
    command = in_troubleshooting(setup)
    [answer] = setup.bus.operator_edit(DOMAIN, {command.command_id: {"n": 2}}, "alice", "a typing error")
    assert answer.done
    assert handle(setup, lambda command, context: dict(command.data)) == 1
    assert setup.command(command.command_id).reply["data"] == {"n": 2}
    assert setup.events(command.command_id)[-4:] == ["OPERATOR_EDIT", "OPERATOR_RETRY", "RECEIVED", "COMPLETED"]
    assert setup.bus.send(DOMAIN, [command]) == {command.command_id: "DUPLICATE"}


def test_operator_cancel_needs_a_reason(setup: Setup) -> None:
    command = in_troubleshooting(setup)
    with pytest.raises(InvalidCommandError, match="needs a reason"):
        setup.bus.operator_cancel(DOMAIN, [command.command_id], " ")


def test_operator_cancel_sends_the_reply_that_was_held_back(setup: Setup) -> None:
    command = in_troubleshooting(setup)
    [answer] = setup.bus.operator_cancel(DOMAIN, [command.command_id], "not needed", "alice")
    assert answer.done
    assert setup.command(command.command_id).status == Status.CANCELED
    [reply] = setup.replies()
    assert (reply["outcome"], reply["error"]["message"]) == ("CANCELED", "not needed")


def test_operator_complete_sends_the_operators_result(setup: Setup) -> None:
    command = in_troubleshooting(setup)
    [answer] = setup.bus.operator_complete(DOMAIN, [command.command_id], {"by": "hand"}, "alice")
    assert answer.done
    assert setup.command(command.command_id).status == Status.COMPLETED
    [reply] = setup.replies()
    assert (reply["outcome"], reply["data"]) == ("SUCCESS", {"by": "hand"})


def test_a_released_command_comes_back_at_once_with_its_attempt(setup: Setup) -> None:
    command = new()
    setup.bus.send(DOMAIN, [command])
    [received] = setup.bus.receive(DOMAIN, qty=1, vt=30)
    assert setup.bus.release(DOMAIN, [received.lease]) == {command.command_id}
    [again] = setup.bus.receive(DOMAIN, qty=1, vt=30)
    assert again.attempt == 1
    assert setup.events(command.command_id) == ["SENT", "RECEIVED", "RELEASED", "RECEIVED"]
    setup.bus.release(DOMAIN, [again.lease], 10)
    assert setup.bus.receive(DOMAIN, qty=1, vt=30) == []
    setup.advance(11)
    assert len(setup.bus.receive(DOMAIN, qty=1, vt=30)) == 1


def test_a_lease_that_ran_out_has_no_power(setup: Setup) -> None:
    command = new()
    setup.bus.send(DOMAIN, [command])
    [late] = setup.bus.receive(DOMAIN, qty=1, vt=30)
    setup.advance(31)
    [owner] = setup.bus.receive(DOMAIN, qty=1, vt=30)
    assert owner.attempt == 1  # a delivery that ended without a word was no attempt
    assert setup.bus.finish(DOMAIN, [Finish(late.lease, Status.COMPLETED)]) == set()
    assert setup.bus.fail(DOMAIN, [Failure(late.lease, ERROR, 1)]) == {}
    assert setup.bus.release(DOMAIN, [late.lease]) == set()
    assert setup.bus.extend(DOMAIN, [late.lease], 60) == {}
    assert setup.replies() == []
    assert setup.bus.finish(DOMAIN, [Finish(owner.lease, Status.COMPLETED)]) == {command.command_id}
    assert setup.bus.finish(DOMAIN, [Finish(owner.lease, Status.COMPLETED)]) == set()
    assert len(setup.replies()) == 1


def test_an_extended_lease_holds_longer(setup: Setup) -> None:
    setup.bus.send(DOMAIN, [new()])
    [received] = setup.bus.receive(DOMAIN, qty=1, vt=30)
    assert setup.bus.extend(DOMAIN, [received.lease], 100) == {received.command.command_id: True}
    setup.advance(60)
    assert setup.bus.receive(DOMAIN, qty=1, vt=30) == []


def test_a_waiting_command_can_be_canceled_and_a_leased_one_not(setup: Setup) -> None:
    waiting, leased = new(delay=10), new()
    setup.bus.send(DOMAIN, [waiting, leased])
    setup.bus.receive(DOMAIN, qty=1, vt=30)
    missing = uuid4()
    ids = [waiting.command_id, leased.command_id, missing]
    answers = {a.command_id: a for a in setup.bus.cancel(DOMAIN, ids, "changed my mind")}
    assert answers[waiting.command_id].done
    assert answers[waiting.command_id].why is None
    assert "leased it" in (answers[leased.command_id].why or "")
    assert "no such command" in (answers[missing].why or "")
    setup.advance(11)
    assert setup.bus.receive(DOMAIN, qty=10, vt=30) == []
    [reply] = setup.replies()
    assert (reply["outcome"], reply["error"]["message"]) == ("CANCELED", "changed my mind")


@pytest.mark.parametrize("message", [{"no": "id"}, {"command_id": "x"}, {"command_id": str(uuid4())}, [], "text", None])
def test_an_unreadable_message_does_not_stop_its_neighbours(setup: Setup, message: Any) -> None:
    first, last = new(), new()
    setup.bus.send(DOMAIN, [first])
    setup.put_raw(message)
    setup.bus.send(DOMAIN, [last])
    received = setup.bus.receive(DOMAIN, qty=10, vt=30)
    assert [r.command.command_id for r in received] == [first.command_id, last.command_id]
    setup.advance(1000)
    assert len(setup.bus.receive(DOMAIN, qty=10, vt=30)) == 2  # the unreadable one is gone for good


def test_the_message_of_an_ended_command_is_set_aside(setup: Setup) -> None:
    command = new()
    setup.bus.send(DOMAIN, [command])
    handle(setup, lambda command, context: None)
    setup.put_raw({"command_id": str(command.command_id), "data": {}})
    assert setup.bus.receive(DOMAIN, qty=10, vt=30) == []
    setup.advance(1000)
    assert setup.bus.receive(DOMAIN, qty=10, vt=30) == []
    assert setup.archived() == [str(command.command_id)]
    assert setup.command(command.command_id).status == Status.COMPLETED


def test_a_paused_domain_takes_commands_and_delivers_none(setup: Setup) -> None:
    setup.pause()
    command = new()
    assert setup.bus.send(DOMAIN, [command]) == {command.command_id: "SENT"}
    assert setup.bus.receive(DOMAIN, qty=10, vt=30) == []


def test_a_bulk_handler_is_called_with_a_list(setup: Setup) -> None:
    command = new()
    setup.bus.send(DOMAIN, [command])
    handle(setup, lambda commands, context: [{"n": len(commands)}], batch_size=10)
    assert setup.command(command.command_id).reply["data"] == {"n": 1}


@dataclass
class Shipment:
    to: str
    within: timedelta


def ship_typed(command: Command[Shipment], context: Any) -> dict[str, Any]:
    return {"to": command.data.to, "days": command.data.within.days}


def test_a_typed_handler_gets_what_was_sent(setup: Setup) -> None:
    command = NewCommand("Ship", uuid4(), Shipment("Rome", timedelta(days=3)))
    again = NewCommand("Ship", command.command_id, {"within": 259200, "to": "Rome"})
    assert setup.bus.send(DOMAIN, [command]) == {command.command_id: "SENT"}
    assert setup.bus.send(DOMAIN, [command, again]) == {command.command_id: "DUPLICATE"}
    assert handle(setup, ship_typed) == 1
    assert setup.command(command.command_id).reply["data"] == {"to": "Rome", "days": 3}


def test_data_that_does_not_fit_its_handler_goes_to_troubleshooting_at_once(setup: Setup) -> None:
    command = new({"to": 7})
    setup.bus.send(DOMAIN, [command])
    assert handle(setup, ship_typed) == 1
    stored = setup.command(command.command_id)
    assert (stored.status, stored.last_error_code) == (Status.IN_TROUBLESHOOTING_QUEUE, "INVALID_DATA")
    assert stored.last_error_msg == "to: must be a string, not an integer; within: missing"
    assert setup.events(command.command_id) == ["SENT", "RECEIVED", "MOVED_TO_TROUBLESHOOTING_QUEUE"]


def in_troubleshooting(setup: Setup) -> NewCommand:
    command = new()
    setup.bus.send(DOMAIN, [command])
    [received] = setup.bus.receive(DOMAIN, qty=1, vt=30)
    assert setup.bus.fail(DOMAIN, [Failure(received.lease, ERROR)]) == {
        command.command_id: Status.IN_TROUBLESHOOTING_QUEUE
    }
    assert setup.replies() == []
    return command
