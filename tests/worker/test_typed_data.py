"""Handlers that say `Command[…]`, in a worker on PostgreSQL."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, assert_type
from uuid import UUID, uuid4

import pytest
from django.db import connection
from pydantic import BaseModel, Field

from commandbus import (
    Command,
    Context,
    NewCommand,
    PermanentCommandError,
    RetryPolicy,
    audit_trail,
    send_command,
    send_commands,
)
from commandbus.handlers import HandlerRegistry
from commandbus.models import Command as StoredCommand
from commandbus.transitions import PostgresTransitions
from tests.helpers import registry_with, reload, replies, result, running_worker, status, wait_until
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


@dataclass(frozen=True)
class Line:
    article: UUID
    amount: Decimal


@dataclass(frozen=True)
class Debit:
    account: str
    amount: Decimal
    lines: tuple[Line, ...] = ()

    def __post_init__(self) -> None:
        if self.account == "a bug":
            raise RuntimeError("this is not for the sender to mend")


class Payment(BaseModel):
    account: str
    amount: Decimal = Field(gt=0)


def debit_account(command: Command[Debit], context: Context) -> dict[str, Any]:
    assert_type(command.data, Debit)
    Order.objects.create(number=command.data.account)
    return {"got": repr(command.data)}


async def debit_later(command: Command[Debit], context: Context) -> dict[str, Any]:
    return {"got": repr(command.data)}


def pay(command: Command[Payment], context: Context) -> dict[str, Any]:
    assert_type(command.data, Payment)
    return {"got": repr(command.data)}


DEBIT = Debit("DE-1", Decimal("1.10"), (Line(uuid4(), Decimal("0.10")),))


@pytest.mark.parametrize(
    ("handler", "data"),
    [(debit_account, DEBIT), (debit_later, DEBIT), (pay, Payment(account="DE-1", amount=Decimal("1.10")))],
)
@pytest.mark.parametrize("transactional", [True, False])
def test_a_handler_gets_what_was_sent(handler: Any, data: Any, transactional: bool) -> None:
    command_id = send_command("orders", "Test", uuid4(), data)
    with running_worker(registry_with(handler, transactional=transactional)):
        wait_until(lambda: status(command_id) == "COMPLETED")
    assert result(command_id) == {"got": repr(data)}


@pytest.mark.parametrize(
    ("handler", "amount", "message"),
    [
        (debit_account, "must be a decimal number", "missing"),
        (pay, "Input should be a valid decimal", "Field required"),
    ],
)
def test_data_that_does_not_fit_goes_to_an_operator_at_once(
    handler: Any, amount: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    command_id = send_command("orders", "Test", uuid4(), {"amount": "SECRET"})
    with caplog.at_level(logging.WARNING, "commandbus.worker"), running_worker(registry_with(handler)):
        wait_until(lambda: status(command_id) == "IN_TROUBLESHOOTING_QUEUE")
    stored = reload(command_id)
    assert (stored.attempts, stored.last_error_code) == (1, "INVALID_DATA")
    assert set((stored.last_error_msg or "").split("; ")) == {f"amount: {amount}", f"account: {message}"}
    moved = audit_trail("orders", command_id)[-1]
    assert moved.event_type == "MOVED_TO_TROUBLESHOOTING_QUEUE"
    assert moved.details_json is not None
    assert moved.details_json["reason"] == "INVALID_DATA"
    error = moved.details_json["error"]
    assert error["code"] == "INVALID_DATA"
    assert sorted(error["details"]["errors"], key=lambda one: str(one["field"])) == [
        {"field": "account", "message": message},
        {"field": "amount", "message": amount},
    ]
    assert list(error["details"]) == ["errors"]
    assert "SECRET" not in json.dumps(moved.details_json) + caplog.text
    assert "command.invalid_data" in caplog.text
    assert replies() == []
    assert not Order.objects.exists()


def test_data_that_is_no_object_goes_the_same_way() -> None:
    command_id = send_command("orders", "Test", uuid4(), {})
    with connection.cursor() as cursor:
        cursor.execute("UPDATE pgmq.q_orders__commands SET message = jsonb_set(message, '{data}', '[\"SECRET\"]')")
    with running_worker(registry_with(debit_account)):
        wait_until(lambda: status(command_id) == "IN_TROUBLESHOOTING_QUEUE")
    assert reload(command_id).last_error_msg == "the data of the message is an array, not a JSON object"


def test_many_errors_are_kept_in_part_and_counted() -> None:
    lines = [{"article": 1, "amount": "1"} for _ in range(80)]
    command_id = send_command("orders", "Test", uuid4(), {"account": "x", "amount": "1", "lines": lines})
    with running_worker(registry_with(debit_account)):
        wait_until(lambda: status(command_id) == "IN_TROUBLESHOOTING_QUEUE")
    details = audit_trail("orders", command_id)[-1].details_json
    assert details is not None
    kept = details["error"]["details"]["errors"]
    assert len(kept) == 50
    assert kept[0] == {"field": "lines.0.article", "message": "must be a UUID, not an integer"}
    assert details["error"]["message"].endswith("; and 30 more")


@pytest.mark.parametrize("transactional", [True, False])
def test_in_bulk_wrong_data_harms_no_neighbour(transactional: bool) -> None:
    calls = []

    def in_bulk(commands: list[Command[Debit]], context: Context) -> None:
        calls.append(sorted(command.data.account for command in commands))

    send_commands(
        "orders",
        [NewCommand("Test", uuid4(), {"account": str(n), "amount": None if n in (0, 3) else "1"}) for n in range(5)],
    )
    with running_worker(registry_with(in_bulk, batch_size=50, transactional=transactional)):
        wait_until(lambda: StoredCommand.objects.filter(status="IN_TROUBLESHOOTING_QUEUE").count() == 2)
        wait_until(lambda: StoredCommand.objects.filter(status="COMPLETED", attempts=1).count() == 3)
    assert calls == [["1", "2", "4"]]
    assert len(replies()) == 3


def debit_in_bulk(commands: Sequence[Command[Debit]], context: Context) -> None:
    Order.objects.bulk_create([Order(number=command.data.account) for command in commands])
    if any(command.data.account == "3" for command in commands):
        raise PermanentCommandError("NO")


def test_in_bulk_each_has_its_typed_data_also_when_it_runs_alone() -> None:
    send_commands("orders", [NewCommand("Test", uuid4(), Debit(str(n), Decimal(1))) for n in range(5)])
    with running_worker(registry_with(debit_in_bulk, batch_size=50)):
        wait_until(lambda: StoredCommand.objects.filter(status="IN_TROUBLESHOOTING_QUEUE").count() == 1)
        wait_until(lambda: StoredCommand.objects.filter(status="COMPLETED").count() == 4)
    assert set(Order.objects.values_list("number", flat=True)) == {"0", "1", "2", "4"}
    assert StoredCommand.objects.get(status="IN_TROUBLESHOOTING_QUEUE").last_error_code == "NO"


def test_a_class_with_a_bug_is_tried_again_and_harms_no_neighbour() -> None:
    handlers = registry_with(debit_in_bulk, batch_size=50, retry_policy=RetryPolicy(backoff=(0,)))
    buggy = send_command("orders", "Test", uuid4(), {"account": "a bug", "amount": "1"})
    fine = send_command("orders", "Test", uuid4(), {"account": "DE-1", "amount": "1"})
    with running_worker(handlers):
        wait_until(lambda: status(buggy) == "IN_TROUBLESHOOTING_QUEUE")
        wait_until(lambda: status(fine) == "COMPLETED")
    assert (reload(buggy).attempts, reload(buggy).last_error_code) == (3, "RuntimeError")


def test_an_operator_can_retry_it_once_the_handler_has_been_mended() -> None:
    command_id = send_command("orders", "Test", uuid4(), {"account": "DE-1", "amount": "1", "currency": "EUR"})
    with running_worker(registry_with(debit_account)):
        wait_until(lambda: status(command_id) == "IN_TROUBLESHOOTING_QUEUE")
    assert reload(command_id).last_error_msg == "currency: unknown"
    [answer] = PostgresTransitions("default").operator_retry("orders", [command_id], "alice", "knows currencies now")
    assert answer.done
    with running_worker(registry_with(pay)):
        wait_until(lambda: status(command_id) == "COMPLETED")


def test_the_examples_in_the_documentation_work(
    commandbus_handlers: HandlerRegistry, commandbus_run: Callable[..., int]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to.md").read_text()
    section = text.split("## Typed data")[1].split("\n## ")[0]
    names: dict[str, Any] = {"__name__": "payments.handlers"}
    for example in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(compile(example, "how-to.md", "exec", dont_inherit=True), names)  # noqa: S102 - they are ours
    assert commandbus_run("payments") == 3
    results = sorted(str(command.reply and command.reply["data"]) for command in StoredCommand.objects.all())
    assert results == ["{'charged': '9.90'}", "{'charged': '9.90'}", "{'refunded': '9.90'}"]


def test_of_a_group_that_takes_too_long_each_is_told_by_its_own_fault() -> None:
    hanging = threading.Event()

    def run(commands: list[Command[Debit]], context: Context) -> None:
        if any(command.data.account == "1" for command in commands):
            hanging.wait(60)

    handlers = registry_with(run, timeout=0.3, batch_size=4)
    data: list[dict[str, Any]] = [{"account": str(n), "amount": None if n == 3 else "1"} for n in range(4)]
    ids = send_commands("orders", [NewCommand("Test", uuid4(), one) for one in data])
    StoredCommand.objects.update(max_attempts=1)
    with running_worker(handlers, concurrency=1):
        wait_until(lambda: status(ids[1]) == status(ids[3]) == "IN_TROUBLESHOOTING_QUEUE")
        wait_until(lambda: status(ids[0]) == status(ids[2]) == "COMPLETED")
        hanging.set()
    assert [reload(ids[n]).last_error_code for n in (1, 3)] == ["TIMEOUT", "INVALID_DATA"]
