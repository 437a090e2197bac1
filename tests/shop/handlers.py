"""Handlers that do as their command tells them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any
from uuid import uuid4

from asgiref.sync import sync_to_async
from django.db import connection, connections

from commandbus import (
    BusinessRuleError,
    Command,
    Context,
    PermanentCommandError,
    Reply,
    RetryPolicy,
    TransientCommandError,
    command_handler,
    reply_handler,
    send_command,
)
from tests.failpoints import reached
from tests.shop.models import Order

QUICKLY = RetryPolicy(max_attempts=3, backoff=(0.1, 0.2))


@command_handler("orders", "PlaceOrder", retry_policy=QUICKLY)
def place_order(command: Command, context: Context) -> dict[str, Any]:
    Order.objects.using(context.using).create(number=str(command.command_id))
    obey(command.data, context)
    return {"attempt": context.attempt}


@command_handler("archive", "KeepOrder", retry_policy=QUICKLY)
def keep_order(command: Command, context: Context) -> dict[str, Any]:
    return {**place_order(command, context), "using": context.using}


@command_handler("orders", "SendMail", retry_policy=QUICKLY, transactional=False)
@command_handler("archive", "SendMail", retry_policy=QUICKLY, transactional=False)
def send_mail(command: Command, context: Context) -> None:
    obey(command.data, context)


@command_handler("orders", "CallAsync", retry_policy=QUICKLY, transactional=False, timeout=0.5)
async def call_async(command: Command, context: Context) -> dict[str, Any]:
    await asyncio.sleep(command.data.get("sleep", 0))
    return {"async": True}


@command_handler("orders", "CreateAsync", retry_policy=QUICKLY)
async def create_async(command: Command, context: Context) -> dict[str, Any]:
    await Order.objects.acreate(number=str(command.command_id))
    if command.data.get("fail"):
        raise PermanentCommandError("NO", "rolled back with its effects")
    return {"in_transaction": await sync_to_async(lambda: connection.in_atomic_block)()}


@command_handler("orders", "ImportOrders", retry_policy=QUICKLY, batch_size=50)
@command_handler("archive", "KeepOrders", retry_policy=QUICKLY, batch_size=50)
def import_orders(commands: list[Command], context: Context) -> None:
    orders = [Order(number=str(command.command_id)) for command in commands]
    Order.objects.using(context.using).bulk_create(orders)
    for command in commands:
        obey(command.data, context)


def obey(data: dict[str, Any], context: Context) -> None:
    reached("in_handler")
    if data.get("kill") == "all":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    elif data.get("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if "barrier" in data:
        with connections[context.using].cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock_shared(%s)", [data["barrier"]])
    if "sleep" in data:
        time.sleep(data["sleep"])
    if "extend" in data:
        context.extend_lease(data["extend"])
    if context.attempt <= data.get("fail_attempts", 0):
        raise TransientCommandError("NOT_YET", f"attempt {context.attempt}")
    if data.get("permanent"):
        raise PermanentCommandError("NEVER", "it cannot work")
    if data.get("refuse"):
        raise BusinessRuleError("NO", "against the rules")
    if data.get("bug"):
        raise RuntimeError("a bug")


@command_handler("orders", "AtOnce", retry_policy=RetryPolicy(max_attempts=3, backoff=(0,)))
def at_once(command: Command, context: Context) -> None:
    obey(command.data, context)


if "COMMANDBUS_TEST_OLD_CODE" not in os.environ:

    @command_handler("orders", "NewKind")
    def new_kind(command: Command, context: Context) -> None:
        """What the code before this deployment did not know."""


@command_handler("orders", "Echo")
def echo(command: Command, context: Context) -> dict[str, Any]:
    """Tells whoever handles the reply what to do."""
    return command.data


@reply_handler("sales", retry_policy=QUICKLY)
def note_reply(reply: Reply, context: Context) -> None:
    Order.objects.create(number=f"{reply.command_id} {reply.outcome}")
    obey(reply.data, context)


@command_handler("orders", "Hang", retry_policy=RetryPolicy(max_attempts=1), timeout=0.2)
def hang(command: Command, context: Context) -> None:
    time.sleep(command.data["seconds"])


@command_handler("orders", "HangAsync", retry_policy=RetryPolicy(max_attempts=1), timeout=0.2, transactional=False)
async def hang_async(command: Command, context: Context) -> None:
    time.sleep(command.data["seconds"])


@command_handler("orders", "Late", retry_policy=RetryPolicy(max_attempts=1), timeout=0.2, transactional=False)
def late(command: Command, context: Context) -> None:
    """Kills its process long after it was written off."""
    time.sleep(1.6)
    os.kill(os.getpid(), signal.SIGKILL)


@command_handler("orders", "Exit")
def leave(command: Command, context: Context) -> None:
    os._exit(0)


@command_handler("orders", "Chain")
def chain(command: Command, context: Context) -> None:
    """Sends the next of its kind until the chain is long enough."""
    obey(command.data, context)
    if command.data["length"] > 1:
        send_command("orders", "Chain", uuid4(), {"length": command.data["length"] - 1})
