"""The fixtures as an application's tests would use them."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import pytest

from commandbus import command_handler, send_command
from commandbus.handlers import HandlerRegistry
from commandbus.pgmq import PgmqClient
from tests.helpers import send, status
from tests.shop.models import Order


def test_commands_run_on_the_tests_own_connection(db: None, commandbus_run: Callable[..., int]) -> None:
    command_id = send()
    assert commandbus_run("orders") == 1
    assert status(command_id) == "COMPLETED"
    assert Order.objects.get().number == str(command_id)
    assert commandbus_run("orders") == 0


def test_time_passes_when_the_test_says_so(
    db: None, commandbus_run: Callable[..., int], commandbus_advance: Callable[..., None]
) -> None:
    command_id = send_command("orders", "PlaceOrder", uuid4(), {"fail_attempts": 1}, delay=3600)
    assert commandbus_run("orders") == 0
    commandbus_advance("orders", 3600)
    assert commandbus_run("orders") == 1
    assert status(command_id) == "PENDING"
    commandbus_advance("orders", 1)
    assert commandbus_run("orders") == 1
    assert status(command_id) == "COMPLETED"


def test_a_command_that_sends_another_is_followed(
    db: None, commandbus_run: Callable[..., int], commandbus_handlers: HandlerRegistry
) -> None:
    @command_handler("orders", "Once")
    def once(command: object, context: object) -> None:
        send()

    send("Once")
    assert commandbus_run("orders") == 2
    assert commandbus_run("orders", limit=0) == 0


def test_handlers_of_a_test_are_gone_after_it(commandbus_handlers: HandlerRegistry) -> None:
    assert commandbus_handlers.get("orders", "Once") is None
    assert commandbus_handlers.get("orders", "PlaceOrder") is not None


@pytest.mark.parametrize("run", [1, 2])
def test_queues_are_empty_after_a_test_that_commits(commandbus_queues: None, run: int) -> None:
    assert PgmqClient().metrics("orders__commands").queue_length == 0
    send()
