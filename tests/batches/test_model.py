"""Random histories of several batches, against a model that only knows what each command is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from uuid import UUID, uuid4

import pytest
from django.db import transaction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from commandbus import (
    BatchCommand,
    BatchRefusedError,
    add_to_batch,
    cancel_batch,
    create_batch,
    open_batch,
    ops,
    repair_batches,
    retry_batch,
    seal_batch,
    send_command,
)
from commandbus.messages import ReceivedCommand, Status
from commandbus.models import Command
from commandbus.testing.time import advance
from tests.batches.helpers import BUS, batch, events, fail, finish, fold_batches, receive, recount, some

pytestmark = pytest.mark.django_db

ANY = st.integers(min_value=0, max_value=1_000_000)
ENDS = (Status.COMPLETED, Status.FAILED, Status.CANCELED)


@dataclass
class Expected:
    """What is known of a batch without asking it."""

    callback: UUID | None
    commands: dict[UUID, Status] = field(default_factory=dict)
    is_sealed: bool = False
    has_started: bool = False
    is_canceled: bool = False
    is_complete: bool = False

    def count(self, status: Status) -> int:
        return Counter(self.commands.values())[status]

    @property
    def has_ended(self) -> bool:
        return self.is_sealed and all(status in ENDS for status in self.commands.values())

    @property
    def status(self) -> str:
        if not self.is_complete:
            return "IN_PROGRESS" if self.has_started else "PENDING"
        done = self.count(Status.COMPLETED) == len(self.commands)
        return "COMPLETED" if done else "COMPLETED_WITH_FAILURES"


class Batches(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.batches: dict[UUID, Expected] = {}
        self.alone: dict[UUID, Status] = {}
        self.leases: list[ReceivedCommand] = []
        self.stale: list[ReceivedCommand] = []
        self.atomic = transaction.atomic()
        self.atomic.__enter__()

    def teardown(self) -> None:
        try:
            self.fold()
            self.counts_are_right()
        finally:
            transaction.set_rollback(True)
            self.atomic.__exit__(None, None, None)

    # What the model knows.

    def place_of(self, command_id: UUID) -> dict[UUID, Status]:
        homes = [expected.commands for expected in self.batches.values()]
        return next((home for home in homes if command_id in home), self.alone)

    def become(self, command_id: UUID, status: Status) -> None:
        self.place_of(command_id)[command_id] = status

    def with_status(self, status: Status) -> list[UUID]:
        every = [self.alone, *(expected.commands for expected in self.batches.values())]
        return [command_id for home in every for command_id, known in home.items() if known is status]

    def some_batch(self, number: int) -> UUID:
        return list(self.batches)[number % len(self.batches)]

    def take_lease(self, number: int) -> ReceivedCommand:
        return self.leases.pop(number % len(self.leases))

    def callback(self, wanted: bool) -> BatchCommand | None:
        return BatchCommand("SendMail", uuid4(), {}) if wanted else None

    # What happens.

    @initialize(size=st.integers(1, 4))
    def begin(self, size: int) -> None:
        self.create(size, called_back=True)
        self.receive(size)

    @rule(called_back=st.booleans())
    def open(self, called_back: bool) -> None:
        callback = self.callback(called_back)
        self.batches[open_batch("orders", on_complete=callback)] = Expected(callback and callback.command_id)

    @rule(size=st.integers(1, 4), called_back=st.booleans())
    def create(self, size: int, called_back: bool) -> None:
        callback, commands = self.callback(called_back), some(size)
        batch_id = create_batch("orders", commands, on_complete=callback)
        expected = Expected(callback and callback.command_id, is_sealed=True)
        expected.commands = {command.command_id: Status.PENDING for command in commands}
        self.batches[batch_id] = expected

    @rule()
    def send_alone(self) -> None:
        self.alone[send_command("orders", "PlaceOrder", uuid4(), {})] = Status.PENDING

    @rule(number=ANY, size=st.integers(0, 4))
    def add(self, number: int, size: int) -> None:
        batch_id = self.some_batch(number)
        expected, commands = self.batches[batch_id], some(size)
        if expected.is_sealed and commands:
            with pytest.raises(BatchRefusedError):
                add_to_batch("orders", batch_id, commands)
            return
        known = [BatchCommand("PlaceOrder", command_id, {}) for command_id in list(expected.commands)[:2]]
        assert add_to_batch("orders", batch_id, [*commands, *known]) == size
        expected.commands |= {command.command_id: Status.PENDING for command in commands}

    @rule(number=ANY)
    def seal(self, number: int) -> None:
        batch_id = self.some_batch(number)
        seal_batch("orders", batch_id)
        self.batches[batch_id].is_sealed = True

    @rule(qty=st.integers(1, 5))
    def receive(self, qty: int) -> None:
        for one in receive(qty):
            command_id = one.command.command_id
            self.stale += [lease for lease in self.leases if lease.command.command_id == command_id]
            self.leases = [lease for lease in self.leases if lease.command.command_id != command_id]
            self.leases.append(one)
            self.become(command_id, Status.IN_PROGRESS)
            if one.command.batch_id is not None:
                self.batches[one.command.batch_id].has_started = True

    @precondition(lambda self: self.leases)
    @rule(number=ANY, status=st.sampled_from(ENDS))
    def finish(self, number: int, status: Status) -> None:
        one = self.take_lease(number)
        assert finish([one], status) == {one.command.command_id}
        self.become(one.command.command_id, status)

    @precondition(lambda self: self.leases)
    @rule()
    def finish_all(self) -> None:
        assert len(finish(self.leases)) == len(self.leases)
        for one in self.leases:
            self.become(one.command.command_id, Status.COMPLETED)
        self.leases = []

    @precondition(lambda self: self.leases)
    @rule(number=ANY, again=st.booleans())
    def fail(self, number: int, again: bool) -> None:
        one = self.take_lease(number)
        [(command_id, status)] = fail([one], 0.0 if again else None).items()
        assert status is (
            Status.PENDING if again and one.attempt < one.max_attempts else Status.IN_TROUBLESHOOTING_QUEUE
        )
        self.become(command_id, status)

    @precondition(lambda self: self.leases)
    @rule(number=ANY)
    def release(self, number: int) -> None:
        one = self.take_lease(number)
        BUS.release("orders", [one.lease])
        self.become(one.command.command_id, Status.PENDING)

    @rule()
    def crash(self) -> None:
        """Whoever holds something says nothing any more; it will be received by another."""
        advance("orders", 60)

    @precondition(lambda self: self.stale)
    @rule(number=ANY, status=st.sampled_from(ENDS))
    def come_too_late(self, number: int, status: Status) -> None:
        one = self.stale[number % len(self.stale)]
        assert finish([one], status) == set()
        assert fail([one]) == {}

    @precondition(lambda self: self.with_status(Status.PENDING))
    @rule(number=ANY)
    def cancel_command(self, number: int) -> None:
        waiting = self.with_status(Status.PENDING)
        command_id = waiting[number % len(waiting)]
        [answer] = BUS.cancel("orders", [command_id])
        assert answer.done
        self.become(command_id, Status.CANCELED)

    @precondition(lambda self: self.with_status(Status.IN_TROUBLESHOOTING_QUEUE))
    @rule(number=ANY, act=st.sampled_from(["retry", "edit", "cancel", "complete"]))
    def operate(self, number: int, act: str) -> None:
        troubled = self.with_status(Status.IN_TROUBLESHOOTING_QUEUE)
        command_id = troubled[number % len(troubled)]
        if act == "retry":
            ops.operator_retry("orders", command_id)
        elif act == "edit":
            ops.operator_edit("orders", command_id, {"better": number})
        elif act == "cancel":
            ops.operator_cancel("orders", command_id, "no use")
        else:
            ops.operator_complete("orders", command_id)
        ends = {"cancel": Status.CANCELED, "complete": Status.COMPLETED}
        self.become(command_id, ends.get(act, Status.PENDING))

    @rule(number=ANY, troubleshooting=st.booleans())
    def cancel_batch(self, number: int, troubleshooting: bool) -> None:
        batch_id = self.some_batch(number)
        expected = self.batches[batch_id]
        if expected.is_complete:
            with pytest.raises(BatchRefusedError):
                cancel_batch("orders", batch_id, "no use")
            return
        cancel_batch("orders", batch_id, "no use", troubleshooting=troubleshooting)
        expected.is_canceled = expected.is_sealed = True
        ended = [Status.PENDING, *([Status.IN_TROUBLESHOOTING_QUEUE] if troubleshooting else [])]
        for command_id, status in expected.commands.items():
            if status in ended:
                expected.commands[command_id] = Status.CANCELED

    @rule(number=ANY)
    def retry_batch(self, number: int) -> None:
        batch_id = self.some_batch(number)
        done = retry_batch("orders", batch_id).done
        assert len(done) == self.batches[batch_id].count(Status.IN_TROUBLESHOOTING_QUEUE)
        self.batches[batch_id].commands |= dict.fromkeys(done, Status.PENDING)

    @rule()
    def fold(self) -> None:
        fold_batches("default")
        for expected in self.batches.values():
            if expected.has_ended and not expected.is_complete:
                expected.is_complete = True
                if expected.callback is not None:
                    self.alone[expected.callback] = Status.PENDING

    @rule()
    def repair(self) -> None:
        assert repair_batches("orders") == []

    @invariant()
    def counts_are_right(self) -> None:
        for batch_id, expected in self.batches.items():
            now = batch(batch_id)
            counted = (now.completed_count, now.failed_count, now.canceled_count)
            assert counted == tuple(map(expected.count, ENDS))
            assert now.in_troubleshooting_count == expected.count(Status.IN_TROUBLESHOOTING_QUEUE)
            assert now.total_count == len(expected.commands)
            assert (now.total_count, *counted, now.in_troubleshooting_count) == recount(batch_id)
            assert now.status == expected.status
            assert (now.is_open, now.is_complete) == (not expected.is_sealed, expected.is_complete)
            assert (now.canceled_at is not None) == expected.is_canceled
            told = Counter(events(batch_id))
            assert told["BATCH_SEALED"] <= 1
            assert told["BATCH_STARTED"] <= expected.has_started
            assert told["BATCH_COMPLETED"] == expected.is_complete
            if expected.callback is not None:
                assert Command.objects.filter(command_id=expected.callback).count() == expected.is_complete
                assert (now.callback_sent_at is not None) == expected.is_complete


def test_random_histories_agree_with_the_model() -> None:
    run_state_machine_as_test(
        Batches,
        settings=settings(
            max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
