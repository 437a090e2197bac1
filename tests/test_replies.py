from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from pgmq import PGMQueue

from commandbus import (
    InvalidCommandError,
    Reply,
    ReplyError,
    ReplyOutcome,
    ReplyTimeoutError,
    UncommittedCommandError,
    UnknownCommandError,
    UnknownDomainError,
    asend_command_and_wait,
    await_for_reply,
    cancel_command,
    ops,
    send_command,
    send_command_and_wait,
    wait_for_reply,
)
from commandbus.exceptions import InvalidDataError
from commandbus.messages import ErrorInfo, Finish, Status
from commandbus.models import Command
from commandbus.pgmq import PgmqClient
from commandbus.transitions import PostgresTransitions
from tests.helpers import BOTH, PATIENCE, libpq_parameters, reload, replies, running_worker, send
from tests.ops.test_troubleshooting import troubled

BUS = PostgresTransitions("default")


def finish(command_id: UUID, status: Status = Status.COMPLETED, **more: Any) -> None:
    [received] = BUS.receive("orders", qty=1, vt=30)
    assert received.command.command_id == command_id
    BUS.finish("orders", [Finish(received.lease, status, **more)])


@pytest.mark.django_db(databases=BOTH)
def test_the_envelope_is_complete_on_the_queue_and_with_the_command() -> None:
    command_id, correlation_id = uuid4(), uuid4()
    send_command("orders", "PlaceOrder", command_id, {}, correlation_id=correlation_id)
    finish(command_id, result={"n": 1})
    [reply] = replies()
    completed_at = reply.pop("completed_at")
    assert datetime.fromisoformat(completed_at).tzinfo is not None
    assert reply == {
        "command_id": str(command_id),
        "correlation_id": str(correlation_id),
        "domain": "orders",
        "type": "PlaceOrderResponse",
        "outcome": "SUCCESS",
        "data": {"n": 1},
        "error": None,
    }
    assert Reply.from_json(reload(command_id).reply or {}) == Reply.from_json({**reply, "completed_at": completed_at})
    assert wait_for_reply(command_id, 0) == Reply(
        command_id,
        correlation_id,
        "orders",
        "PlaceOrderResponse",
        ReplyOutcome.SUCCESS,
        datetime.fromisoformat(completed_at),
        {"n": 1},
    )
    assert len(replies()) == 1  # nothing was consumed


@pytest.mark.django_db(databases=BOTH)
@pytest.mark.parametrize("outcome", ["FAILED", "CANCELED"])
def test_a_refusal_says_why(outcome: str) -> None:
    command_id = send()
    finish(command_id, Status(outcome), error=ErrorInfo("Broke", "NO_FUNDS", "there are 3 left"))
    reply = wait_for_reply(command_id, 0)
    assert (reply.outcome, reply.data) == (outcome, {})
    assert reply.error == ReplyError("NO_FUNDS", "there are 3 left", "Broke")
    assert replies()[0]["error"] == {"code": "NO_FUNDS", "message": "there are 3 left", "class": "Broke"}


@pytest.mark.django_db(databases=BOTH)
def test_cancel_and_the_operators_send_replies_too() -> None:
    canceled = send()
    cancel_command("orders", canceled, "changed my mind")
    by_operator, completed = troubled(), troubled()
    ops.operator_cancel("orders", by_operator, "nobody needs it")
    ops.operator_complete("orders", completed, {"n": 1})
    answers = [wait_for_reply(command_id, 0) for command_id in (canceled, by_operator, completed)]
    assert [answer.outcome for answer in answers] == ["CANCELED", "CANCELED", "SUCCESS"]
    assert [answer.error.message for answer in answers if answer.error] == ["changed my mind", "nobody needs it"]
    assert answers[2].data == {"n": 1}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"command_id": "7"},
        {"outcome": "MAYBE"},
        {"error": "text"},
        {"completed_at": "yesterday"},
        {"data": 7},
        {"command_id": 7},
    ],
)
def test_what_is_no_reply_is_refused(body: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "command_id": str(uuid4()),
        "correlation_id": str(uuid4()),
        "domain": "orders",
        "type": "PlaceOrderResponse",
        "outcome": "SUCCESS",
        "completed_at": datetime.now(UTC).isoformat(),
        "data": {},
        "error": None,
    }
    assert Reply.from_json(good).domain == "orders"
    with pytest.raises(InvalidDataError, match="this is not the envelope of a reply"):
        Reply.from_json({**good, **body} if body else {})


@pytest.mark.django_db(transaction=True)
def test_the_official_client_reads_the_reply_queue() -> None:
    command_id = send()
    finish(command_id, result={"n": 1})
    parameters = libpq_parameters()
    client = PGMQueue(
        host=parameters["host"],
        port=str(parameters.get("port", 5432)),
        database=parameters["dbname"],
        username=parameters["user"],
        password=parameters.get("password", ""),
        pool_size=1,
        init_extension=False,
    )
    try:
        message = client.read("orders__replies", vt=30)
        assert message is not None
        assert not isinstance(message, list)
        assert message.message["command_id"] == str(command_id)
        assert message.message["data"] == {"n": 1}
        assert client.delete("orders__replies", message.msg_id)
    finally:
        assert client.pool is not None
        client.pool.close()
    assert replies() == []


@pytest.mark.django_db(transaction=True, databases=BOTH)
def test_it_waits_until_the_reply_is_there() -> None:
    command_id = send()
    found: list[Reply] = []

    def wait() -> None:
        try:
            found.append(wait_for_reply(command_id, PATIENCE))
        finally:
            connections.close_all()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    finish(command_id, result={"n": 1})
    waiter.join(PATIENCE)
    assert [reply.data for reply in found] == [{"n": 1}]


@pytest.mark.django_db(transaction=True, databases=BOTH)
def test_async_code_waits_without_a_thread() -> None:
    command_id = send()

    async def wait() -> Reply:
        waiting = asyncio.create_task(await_for_reply(command_id, PATIENCE))
        await asyncio.sleep(0)
        await sync_to_async(finish)(command_id, result={"n": 1})
        return await waiting

    assert async_to_sync(wait)().data == {"n": 1}


@pytest.mark.django_db(transaction=True, databases=BOTH)
def test_after_the_time_an_error_says_how_far_it_is() -> None:
    waiting, in_trouble = troubled(), troubled()
    ops.operator_retry("orders", waiting)
    with pytest.raises(ReplyTimeoutError, match=r"within 0\.01 seconds; its status is PENDING"):
        wait_for_reply(waiting, 0.01)
    with pytest.raises(TimeoutError, match="it waits for an operator"):
        wait_for_reply(in_trouble, 0)


@pytest.mark.django_db(transaction=True, databases=BOTH)
def test_a_command_that_nobody_sent_is_an_error_at_once() -> None:
    with pytest.raises(UnknownCommandError, match="in any domain"):
        wait_for_reply(uuid4(), PATIENCE)
    with pytest.raises(UnknownCommandError, match="in domain 'other'"):
        wait_for_reply(send(), PATIENCE, domain="other")
    with pytest.raises(UnknownDomainError, match="odrers"):
        wait_for_reply(send(), PATIENCE, domain="odrers")


@pytest.mark.django_db
@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "5", None, True])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(InvalidCommandError, match="timeout must be a number of seconds"):
        wait_for_reply(uuid4(), timeout)
    with pytest.raises(InvalidCommandError, match="timeout must be a number of seconds"):
        send_command_and_wait("orders", "PlaceOrder", uuid4(), {}, timeout=timeout)
    assert not Command.objects.exists()


@pytest.mark.django_db(databases=BOTH)
def test_an_id_that_two_domains_have_needs_the_domain() -> None:
    command_id = send()
    send_command("other", "X", command_id, {})
    finish(command_id)
    with pytest.raises(InvalidCommandError, match="orders, other"):
        wait_for_reply(command_id, 0)
    assert wait_for_reply(command_id, 0, domain="orders").domain == "orders"


@pytest.mark.django_db(transaction=True, databases=BOTH)
def test_waiting_for_what_this_transaction_has_sent_fails_at_once() -> None:
    with transaction.atomic():
        command_id = send()
        with pytest.raises(UncommittedCommandError, match=f"{command_id} before the transaction on database 'default'"):
            wait_for_reply(command_id, PATIENCE)
    with transaction.atomic(), transaction.atomic():
        other = send()
        with pytest.raises(UncommittedCommandError):
            async_to_sync(await_for_reply)(other, PATIENCE)


@pytest.mark.django_db(transaction=True, databases=BOTH)
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_transaction_can_wait_for_what_was_sent_before_it(isolation: str) -> None:
    command_id = send()
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}")
        assert Command.objects.get().status == "PENDING"  # takes the snapshot

        def other() -> None:
            try:
                finish(command_id, result={"n": 1})
            finally:
                connections.close_all()

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        assert wait_for_reply(command_id, PATIENCE).data == {"n": 1}
        thread.join(PATIENCE)


@pytest.mark.django_db(transaction=True, databases=BOTH)
def test_without_autocommit_it_is_a_transaction_as_well() -> None:
    transaction.set_autocommit(False)
    try:
        command_id = send()
        with pytest.raises(UncommittedCommandError):
            wait_for_reply(command_id, PATIENCE)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


@pytest.mark.django_db(databases=BOTH)
def test_in_a_test_that_never_commits_a_reply_that_is_there_is_found(commandbus_run: Any) -> None:
    command_id = send("SendMail")
    commandbus_run("orders")
    assert wait_for_reply(command_id, 5).outcome == "SUCCESS"


@pytest.mark.django_db(transaction=True, databases=BOTH)
def test_send_and_wait_in_one() -> None:
    command_id = uuid4()
    with running_worker():
        reply = send_command_and_wait("orders", "PlaceOrder", command_id, {}, timeout=PATIENCE)
        again = send_command_and_wait("orders", "PlaceOrder", command_id, {}, timeout=PATIENCE)
        other = async_to_sync(asend_command_and_wait)("orders", "SendMail", uuid4(), {}, timeout=PATIENCE)
    assert reply.data == {"attempt": 1}
    assert again == reply
    assert other.type == "SendMailResponse"


@pytest.mark.django_db(transaction=True)
def test_send_and_wait_sends_nothing_in_a_transaction() -> None:
    with transaction.atomic():
        with pytest.raises(UncommittedCommandError):
            send_command_and_wait("orders", "PlaceOrder", uuid4(), {}, timeout=PATIENCE)
        with pytest.raises(UncommittedCommandError):
            async_to_sync(asend_command_and_wait)("orders", "PlaceOrder", uuid4(), {}, timeout=PATIENCE)
    assert not Command.objects.exists()


@pytest.mark.django_db
def test_a_shared_queue_takes_the_replies_of_all(settings: Any) -> None:
    from commandbus.install import register_domains

    settings.COMMANDBUS = {"DOMAINS": ["orders", "other"], "REPLY_QUEUE": "answers"}
    register_domains("default")
    first = send_command("orders", "X", uuid4(), {})
    second = send_command("other", "X", uuid4(), {})
    for domain in ("orders", "other"):
        [received] = BUS.receive(domain, qty=1, vt=30)
        BUS.finish(domain, [Finish(received.lease, Status.COMPLETED)])
    found = {m.message["command_id"] for m in PgmqClient().read("answers", vt=0, qty=10)}
    assert found == {str(first), str(second)}
    assert wait_for_reply(first, 0).domain == "orders"


@pytest.mark.django_db(transaction=True, databases=BOTH)
def test_replies_of_a_command_that_failed_before_it_recovered_come_once() -> None:
    command_id = send("SendMail", fail_attempts=2)
    with running_worker():
        assert wait_for_reply(command_id, PATIENCE).outcome == "SUCCESS"
    assert len(replies()) == 1


@pytest.mark.django_db(transaction=True)
def test_one_connection_is_enough_where_transactions_are_managed_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    command_id = send()
    monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", False)
    connection.close()
    copies: list[Any] = []
    copy = BaseDatabaseWrapper.copy

    def counted(self: Any) -> Any:
        copies.append(copy(self))
        return copies[-1]

    def greet(connection: Any, **_: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")

    monkeypatch.setattr(BaseDatabaseWrapper, "copy", counted)
    connection_created.connect(greet)  # as projects do that have something to set for each connection
    try:
        with pytest.raises(ReplyTimeoutError, match="PENDING"):
            wait_for_reply(command_id, 0.1, domain="orders")
    finally:
        connection_created.disconnect(greet)
    transaction.rollback()
    connection.close()
    assert len(copies) == 1
    assert copies[0].connection is None


@pytest.mark.django_db(transaction=True)
def test_what_is_pruned_meanwhile_has_no_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    command_id = send()

    def prune(seconds: float) -> None:
        Command.objects.all().delete()

    monkeypatch.setattr("commandbus.waiting.time.sleep", prune)
    with pytest.raises(UnknownCommandError, match="pruned meanwhile"):
        wait_for_reply(command_id, PATIENCE, domain="orders")
