from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction

from commandbus import (
    BatchCommand,
    BatchRefusedError,
    BatchStatus,
    CommandBus,
    DuplicateCommandError,
    InvalidCommandError,
    NewCommand,
    UnknownBatchError,
    UnknownDomainError,
    UnknownQueueError,
    acreate_batch,
    add_to_batch,
    aget_batch,
    alist_batch_commands,
    alist_batches,
    audit_trail,
    create_batch,
    get_batch,
    get_command,
    list_batch_commands,
    list_batches,
    open_batch,
    send_command,
    uuid7,
)
from commandbus.models import Audit, Command
from commandbus.pgmq import PgmqClient
from tests.batches.helpers import BUS, batch, counts, events, finish, folded, make, nothing_is_left, receive, some

pytestmark = pytest.mark.django_db


def test_a_batch_is_created_with_all_its_commands() -> None:
    commands = some(3)
    batch_id = create_batch("orders", commands, name="May", custom_data={"by": "import"})
    made = batch(batch_id)
    assert (made.domain, made.name, made.custom_data, made.status) == ("orders", "May", {"by": "import"}, "PENDING")
    assert counts(batch_id) == (3, 0, 0, 0, 0)
    assert made.waiting_count == 3
    assert (made.started_at, made.completed_at) == (None, None)
    assert made.sealed_at is not None
    assert [command.command_id for command in list_batch_commands("orders", batch_id)] == [
        command.command_id for command in sorted(commands, key=lambda command: command.command_id)
    ]
    assert {one.command.command_id for one in receive()} == {command.command_id for command in commands}


def test_a_handler_knows_the_batch_of_its_command() -> None:
    batch_id = make(1)
    send_command("orders", "PlaceOrder", uuid4(), {})
    assert {one.command.batch_id for one in receive()} == {batch_id, None}


def test_reply_queue_and_correlation_are_those_of_the_command() -> None:
    one = BatchCommand("PlaceOrder", uuid4(), {"a": 1}, "orders__replies", uuid4())
    batch_id = create_batch("orders", [one])
    [command] = list_batch_commands("orders", batch_id)
    assert (command.reply_queue, command.correlation_id) == ("orders__replies", one.correlation_id)


def test_a_command_of_a_batch_may_be_delayed() -> None:
    create_batch("orders", [NewCommand("PlaceOrder", uuid4(), {}, delay=60)])
    assert receive() == []


def test_a_batch_without_commands_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least one command.*open_batch"):
        create_batch("orders", [])
    assert nothing_is_left()


def test_many_commands_are_streamed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commandbus.batches.CHUNK", 10)
    taken = 0

    def generated() -> Iterator[BatchCommand]:
        nonlocal taken
        for command in some(95):
            taken += 1
            # Never more than one chunk ahead of what is sent.
            assert taken - Command.objects.count() <= 10
            yield command

    batch_id = create_batch("orders", generated())
    assert counts(batch_id) == (95, 0, 0, 0, 0)
    assert Command.objects.filter(batch_id=batch_id).count() == 95


@pytest.mark.parametrize(
    ("bad", "error", "why"),
    [
        (BatchCommand("", uuid4(), {}), InvalidCommandError, "number 13: command .* 1 to 255 characters"),
        (BatchCommand("PlaceOrder", "x", {}), InvalidCommandError, "number 13: command_id must be a UUID, not 'x'"),  # type: ignore[arg-type]
        (BatchCommand("PlaceOrder", UUID(int=5), {"a": object()}), InvalidCommandError, "0005.*object"),
        (BatchCommand("PlaceOrder", uuid4(), {}, "nowhere"), UnknownQueueError, "number 13: .*nowhere"),
        ({"command_type": "PlaceOrder"}, InvalidCommandError, "number 13 must be a BatchCommand, not {'command_type'"),
    ],
)
def test_one_invalid_command_and_nothing_is_created(
    bad: Any, error: type[Exception], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commandbus.batches.CHUNK", 5)
    with pytest.raises(error, match=why):
        create_batch("orders", [*some(12), bad, *some(3)])
    assert nothing_is_left()
    assert PgmqClient().read("orders__commands", vt=0, qty=10) == []


@pytest.mark.parametrize("data", [{"same": 1}, {"other": 1}])
def test_a_command_that_was_sent_before_cannot_become_part_of_a_batch(
    data: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commandbus.batches.CHUNK", 5)
    known = send_command("orders", "PlaceOrder", uuid4(), {"same": 1})
    with pytest.raises(DuplicateCommandError, match=f"number 8: .*{known}") as raised:
        create_batch("orders", [*some(7), BatchCommand("PlaceOrder", known, data), *some(7)])
    assert raised.value.command_ids == [known]
    assert Command.objects.count() == 1
    assert list_batches("orders") == []


@pytest.mark.parametrize("chunk", [2, 100])
def test_a_command_that_is_in_the_batch_twice_is_refused(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commandbus.batches.CHUNK", chunk)
    [one] = some()
    with pytest.raises(DuplicateCommandError, match=f"number 4: command {one.command_id} is in the batch twice"):
        create_batch("orders", [one, *some(2), one])
    assert nothing_is_left()


def test_a_refused_batch_does_not_break_the_callers_transaction() -> None:
    with transaction.atomic():
        with pytest.raises(InvalidCommandError):
            create_batch("orders", [*some(2), BatchCommand("", uuid4(), {})])
        kept = send_command("orders", "PlaceOrder", uuid4(), {})
    assert get_command("orders", kept) is not None
    assert Command.objects.count() == 1


def test_a_batch_is_part_of_the_callers_transaction() -> None:
    with transaction.atomic():
        make(3)
        transaction.set_rollback(True)
    assert nothing_is_left()


@pytest.mark.parametrize("options", [{"name": ""}, {"name": "x" * 256}, {"name": 7}, {"name": "\x00"}])
def test_a_name_that_cannot_be_stored_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidCommandError, match="1 to 255 characters"):
        make(1, **options)


@pytest.mark.parametrize("custom_data", [[1], "text", {"a": {1, 2}}])
def test_custom_data_must_be_an_object(custom_data: Any) -> None:
    with pytest.raises(InvalidCommandError, match="custom_data"):
        make(1, custom_data=custom_data)


def test_an_unknown_domain_is_refused() -> None:
    with pytest.raises(UnknownDomainError):
        create_batch("nowhere", some(1))


def test_no_batch_can_be_made_of_replies() -> None:
    with pytest.raises(InvalidCommandError, match="reply queue"):
        create_batch("sales__replies", some(1))


def test_a_batch_that_does_not_exist_is_an_error() -> None:
    missing = uuid7()
    assert get_batch("orders", missing) is None
    with pytest.raises(UnknownBatchError, match=str(missing)):
        list_batch_commands("orders", missing)
    with pytest.raises(UnknownBatchError, match=str(missing)):
        add_to_batch("orders", missing, some(1))
    with pytest.raises(UnknownBatchError, match=str(missing)):
        add_to_batch("orders", missing, [])
    with pytest.raises(InvalidCommandError, match="batch_id must be a UUID"):
        get_batch("orders", "nonsense")  # type: ignore[arg-type]
    assert nothing_is_left()


def test_a_batch_of_another_domain_is_not_found() -> None:
    batch_id = make(1, domain="reports")
    assert get_batch("orders", batch_id) is None
    with pytest.raises(UnknownBatchError):
        add_to_batch("orders", batch_id, some(1))


def test_sql_refuses_a_batch_that_does_not_exist() -> None:
    with pytest.raises(UnknownBatchError, match="create it with create_batch"):
        BUS.send("orders", some(1), batch_id=uuid7())


def test_sql_refuses_what_it_cannot_store() -> None:
    for values in [(None, None), (str(uuid7()), "x" * 256)]:
        with pytest.raises(InvalidCommandError, match="cannot be created"), transaction.atomic():
            BUS.open_batch("orders", values[0], name=values[1])  # type: ignore[arg-type]
    with pytest.raises(InvalidCommandError, match="cannot be created"), transaction.atomic():
        BUS.open_batch("sales__replies", uuid7())


def test_batches_are_listed_from_the_newest_by_status() -> None:
    waits, runs, done = make(1), make(1), make(1)
    taken = {one.command.batch_id: one for one in receive()}
    finish([taken[done]])
    BUS.release("orders", [taken[waits].lease])
    make(1, domain="reports")
    assert [one.batch_id for one in list_batches("orders")] == [done, runs, waits]
    assert [one.batch_id for one in list_batches("orders", limit=1, offset=1)] == [runs]
    for _ in range(2):  # what is not folded is counted all the same
        assert [one.batch_id for one in list_batches("orders", status="PENDING")] == []
        running = list_batches("orders", status=BatchStatus.IN_PROGRESS)
        assert {one.batch_id for one in running} >= {runs, waits}
        assert {one.status for one in running} == {BatchStatus.IN_PROGRESS}
        folded(done)
    assert [one.batch_id for one in list_batches("orders", status="COMPLETED")] == [done]
    with pytest.raises(ValueError, match="RUNNING"):
        list_batches("orders", status="RUNNING")


def test_commands_of_a_batch_are_listed_by_status() -> None:
    batch_id = make(5)
    taken = receive(3)
    finish(taken[:1])
    BUS.cancel("orders", [one.command_id for one in list_batch_commands("orders", batch_id, status="PENDING")][:1])
    assert len(list_batch_commands("orders", batch_id, status="COMPLETED")) == 1
    assert len(list_batch_commands("orders", batch_id, status="IN_PROGRESS")) == 2
    assert len(list_batch_commands("orders", batch_id, status="CANCELED")) == 1
    assert len(list_batch_commands("orders", batch_id, status="PENDING")) == 1
    assert len(list_batch_commands("orders", batch_id, limit=2, offset=4)) == 1


def test_the_audit_of_a_command_names_its_batch() -> None:
    batch_id = make(1)
    taken = receive()
    finish(taken)
    trail = audit_trail("orders", taken[0].command.command_id)
    assert [(event.event_type, event.batch_id) for event in trail] == [
        ("SENT", batch_id),
        ("RECEIVED", batch_id),
        ("COMPLETED", batch_id),
    ]
    assert folded(batch_id).is_complete
    assert events(batch_id) == ["BATCH_SEALED", "BATCH_STARTED", "BATCH_COMPLETED"]
    alone = send_command("orders", "PlaceOrder", uuid4(), {})
    assert Audit.objects.get(command_id=alone).batch_id is None


def test_commands_of_an_open_batch_are_worked_at_once() -> None:
    batch_id = open_batch("orders")
    add_to_batch("orders", batch_id, some(2))
    assert finish(receive())
    assert counts(batch_id) == (2, 2, 0, 0, 0)
    assert not folded(batch_id).is_complete


def test_a_batch_cannot_be_opened_with_a_total_that_is_no_number() -> None:
    for total in (-1, "many", True, 2**31):
        with pytest.raises(InvalidCommandError, match="total must be a number"):
            open_batch("orders", total)  # type: ignore[arg-type]


def test_opening_a_batch_again_does_nothing() -> None:
    batch_id = uuid7()
    assert open_batch("orders", 3, name="May", batch_id=batch_id) == batch_id
    assert open_batch("orders", 3, name="May", batch_id=batch_id) == batch_id
    with pytest.raises(BatchRefusedError, match=f"{batch_id} exists already, with another total"):
        open_batch("orders", 4, name="May", batch_id=batch_id)
    with pytest.raises(BatchRefusedError, match="another domain"):
        open_batch("reports", 3, name="May", batch_id=batch_id)
    assert batch(batch_id).expected_count == 3


@pytest.mark.django_db(transaction=True)
def test_the_asynchronous_forms_do_the_same() -> None:
    async def journey() -> None:
        batch_id = await acreate_batch("orders", some(2), name="later")
        found = await aget_batch("orders", batch_id)
        assert found is not None
        assert (found.name, found.total_count) == ("later", 2)
        assert [one.batch_id for one in await alist_batches("orders")] == [batch_id]
        assert len(await alist_batch_commands("orders", batch_id)) == 2

    async_to_sync(journey)()


def test_the_bus_as_one_object_has_batches_too() -> None:
    bus = CommandBus()
    batch_id = bus.create_batch("orders", some(2), name="May")
    found = bus.get_batch("orders", batch_id)
    assert found is not None
    assert found.name == "May"
    assert [one.batch_id for one in bus.list_batches("orders", status="PENDING")] == [batch_id]
    assert len(bus.list_batch_commands("orders", batch_id, status="PENDING", limit=1)) == 1
