"""Commands are added to an open batch, by many at once, until it is sealed."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from uuid import UUID

import pytest
from django.db import OperationalError, transaction

from commandbus import (
    BatchCommand,
    BatchMetadata,
    BatchRefusedError,
    BatchStatus,
    DuplicateCommandError,
    UnknownBatchError,
    add_to_batch,
    cancel_batch,
    open_batch,
    ops,
    seal_batch,
    uuid7,
)
from commandbus.messages import TERMINAL as ENDS
from commandbus.messages import Failure, Finish
from commandbus.models import Batch, Command
from tests.batches.helpers import (
    BUS,
    ERROR,
    batch,
    counts,
    events,
    finish,
    fold_batches,
    folded,
    in_another_session,
    make,
    on_complete,
    receive,
    recount,
    some,
    somebody_waits,
)
from tests.helpers import PATIENCE, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def test_who_adds_commands_holds_up_the_seal_but_not_the_fold(others: Callable[..., Future[BatchMetadata]]) -> None:
    batch_id = open_batch("orders")
    add_to_batch("orders", batch_id, some(2))
    with transaction.atomic():
        assert add_to_batch("orders", batch_id, some(3)) == 3
        sealing = others(lambda: seal_batch("orders", batch_id))
        wait_until(somebody_waits)
        assert not sealing.done()
    assert sealing.result().total_count == 5
    assert folded(batch_id).total_count == 5


def test_a_batch_is_folded_while_somebody_adds_to_it() -> None:
    batch_id = open_batch("orders")
    add_to_batch("orders", batch_id, some(2))
    with in_another_session() as cursor:
        cursor.execute("SELECT commandbus.join_batch('orders', %s)", [batch_id])
        fold_batches("default")
        assert Batch.objects.get(batch_id=batch_id).total_count == 2
        cursor.execute("COMMIT")


def test_who_adds_to_a_batch_that_is_just_sealed_is_refused(others: Callable[..., Future[int]]) -> None:
    batch_id = open_batch("orders")
    with transaction.atomic():
        seal_batch("orders", batch_id)
        adding = others(lambda: add_to_batch("orders", batch_id, some(1)))
        wait_until(somebody_waits)
    with pytest.raises(BatchRefusedError, match="takes no more commands: it was sealed"):
        adding.result()
    assert batch(batch_id).total_count == 0
    assert not Command.objects.exists()


def test_many_add_the_same_commands_at_once_and_each_is_sent_once(others: Callable[..., Future[int]]) -> None:
    batch_id = open_batch("orders", 300)
    commands = some(300)

    def add(first: int) -> int:
        turned = commands[first:] + commands[:first]
        return sum(add_to_batch("orders", batch_id, turned[start : start + 50]) for start in range(0, 300, 50))

    adding = [others(lambda first=50 * number: add(first)) for number in range(6)]
    assert sum(one.result() for one in adding) == 300
    assert seal_batch("orders", batch_id).total_count == 300
    assert counts(batch_id) == recount(batch_id)
    while taken := receive():
        finish(taken)
    assert folded(batch_id).status is BatchStatus.COMPLETED


def test_adding_again_does_nothing_also_after_the_seal() -> None:
    batch_id = open_batch("orders")
    commands = some(3)
    assert add_to_batch("orders", batch_id, commands) == 3
    assert add_to_batch("orders", batch_id, commands) == 0
    seal_batch("orders", batch_id)
    assert add_to_batch("orders", batch_id, commands) == 0
    with pytest.raises(BatchRefusedError, match="takes no more commands"):
        add_to_batch("orders", batch_id, [*commands, *some(1)])
    assert counts(batch_id) == (3, 0, 0, 0, 0)


def test_what_was_sent_as_part_of_something_else_cannot_be_added() -> None:
    batch_id, other = open_batch("orders"), make(1)
    [stranger] = Command.objects.filter(batch_id=other)
    with pytest.raises(DuplicateCommandError, match=f"number 3: command {stranger.command_id} .*not as part of this"):
        add_to_batch("orders", batch_id, [*some(2), BatchCommand("PlaceOrder", stranger.command_id, {})])
    with pytest.raises(DuplicateCommandError, match="another type or other data"):
        add_to_batch("orders", batch_id, [BatchCommand("PlaceOrder", stranger.command_id, {"other": 1})])
    assert counts(batch_id) == (0, 0, 0, 0, 0)


def test_a_batch_is_sealed_only_with_as_many_commands_as_were_expected() -> None:
    batch_id = open_batch("orders", 3)
    add_to_batch("orders", batch_id, some(2))
    with pytest.raises(BatchRefusedError, match=r"has 2 commands, but 3 were expected.*allow_incomplete"):
        seal_batch("orders", batch_id)
    assert batch(batch_id).is_open
    assert events(batch_id) == []
    assert not seal_batch("orders", batch_id, allow_incomplete=True, operator="ada").is_open
    assert not seal_batch("orders", batch_id).is_open  # again
    assert events(batch_id) == ["BATCH_SEALED"]


def test_sealing_a_batch_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(UnknownBatchError):
        seal_batch("orders", uuid7())


def test_who_adds_does_not_pass_a_seal_that_waits(others: Callable[..., Future[Any]]) -> None:
    batch_id = open_batch("orders")
    join = "SELECT commandbus.join_batch('orders', %s)"
    with in_another_session() as first, in_another_session() as later:
        first.execute(join, [batch_id])
        sealing = others(lambda: seal_batch("orders", batch_id))
        wait_until(somebody_waits)
        later.execute("SET LOCAL lock_timeout = '100ms'")
        with pytest.raises(OperationalError, match="lock timeout"):
            later.execute(join, [batch_id])
        first.execute(join, [batch_id])  # who has begun can go on
        first.execute("COMMIT")
        assert not sealing.result(PATIENCE).is_open


def test_many_sessions_at_once_count_what_there_is(others: Callable[..., Future[None]]) -> None:
    """Some add, some work and fail, one operates, one folds, all at the same time."""
    batches = [open_batch("orders", on_complete=on_complete()) for _ in range(3)]
    given_up = threading.Event()

    def add(batch_id: UUID) -> None:
        for _ in range(20):
            add_to_batch("orders", batch_id, some(5))
        seal_batch("orders", batch_id)

    def work(number: int) -> None:
        chance = random.Random(number)
        while not given_up.is_set() and any(batch(batch_id).ended_count < 100 for batch_id in batches):
            taken = receive(7)
            failing = chance.randint(0, 2)
            BUS.finish("orders", [Finish(one.lease, chance.choice(ENDS)) for one in taken[failing:]])
            BUS.fail("orders", [Failure(one.lease, ERROR, chance.choice([None, 0.0])) for one in taken[:failing]])
            ops.operator_retry_many("orders", ops.EVERYTHING)
            if number == 0:
                fold_batches()

    adding = [others(lambda batch_id=batch_id: add(batch_id)) for batch_id in batches]
    working = [others(lambda number=number: work(number)) for number in range(4)]
    try:
        for one in [*adding, *working]:
            one.result(PATIENCE)
    finally:
        given_up.set()
    fold_batches()
    for batch_id in batches:
        assert counts(batch_id) == recount(batch_id)
        assert batch(batch_id).is_complete
        assert Counter(events(batch_id)) == Counter(["BATCH_SEALED", "BATCH_STARTED", "BATCH_COMPLETED"])


def test_canceling_an_open_batch_ends_it() -> None:
    batch_id = open_batch("orders")
    add_to_batch("orders", batch_id, some(2))
    assert len(cancel_batch("orders", batch_id, "no use").done) == 2
    with pytest.raises(BatchRefusedError, match="it was canceled at"):
        add_to_batch("orders", batch_id, some(1))
    assert folded(batch_id).status is BatchStatus.COMPLETED_WITH_FAILURES
