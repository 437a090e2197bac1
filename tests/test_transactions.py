"""Which transaction a send belongs to, where domains live on two real databases."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from asgiref.sync import async_to_sync
from django.db import connections, transaction
from django.test import TestCase, override_settings

from commandbus import (
    CommandBus,
    NewCommand,
    ReplyTimeoutError,
    TransactionMismatchError,
    UncommittedCommandError,
    UnknownDomainError,
    asend_command,
    asend_command_and_wait,
    get_command,
    send_command,
    send_command_and_wait,
    send_commands,
)
from commandbus.models import Audit, Command
from commandbus.pgmq import PgmqClient
from tests.helpers import BOTH, keep, status
from tests.settings import TEST_SERVER
from tests.shell.helpers import run
from tests.shop.models import Order

both = pytest.mark.django_db(databases=BOTH)
both_committing = pytest.mark.django_db(transaction=True, databases=BOTH)


def nothing_was_sent(using: str = "second", domain: str = "archive") -> bool:
    queue = PgmqClient(using).metrics(f"{domain}__commands").queue_length
    written = Command.objects.using(using).exists() or Audit.objects.using(using).exists()
    return not written and queue == 0


@both_committing
def test_a_send_joins_the_transaction_of_its_own_database() -> None:
    with transaction.atomic(using="second"):
        sent = keep()
        Order.objects.using("second").create(number="with it")
        with psycopg.connect(TEST_SERVER.url(connections["second"].settings_dict["NAME"])) as other:
            assert other.execute("SELECT count(*) FROM command_bus_command").fetchone() == (0,)
    assert status(sent, "archive") == "PENDING"
    assert not Command.objects.using("default").exists()


@both_committing
@pytest.mark.parametrize("count", [1, 2500])
def test_a_send_is_rolled_back_with_the_transaction_of_its_own_database(count: int) -> None:
    with transaction.atomic(using="second"):
        send_commands("archive", [NewCommand("KeepOrder", uuid4(), {}) for _ in range(count)])
        transaction.set_rollback(True, using="second")
    assert nothing_was_sent()


WAYS: dict[str, Callable[..., object]] = {
    "send_command": lambda **options: send_command("archive", "KeepOrder", uuid4(), {}, **options),
    "send_commands": lambda **options: send_commands("archive", [NewCommand("KeepOrder", uuid4(), {})], **options),
    "asend_command": lambda **options: async_to_sync(asend_command)("archive", "KeepOrder", uuid4(), {}, **options),
    "CommandBus": lambda **options: CommandBus().send("archive", "KeepOrder", uuid4(), {}, **options),
}
way_of_sending = pytest.mark.parametrize("way", WAYS)


@both_committing
@way_of_sending
def test_a_send_in_the_transaction_of_another_database_is_refused_with_the_remedies(way: str) -> None:
    with transaction.atomic():
        Order.objects.create(number="before")
        with pytest.raises(TransactionMismatchError) as caught:
            WAYS[way]()
        Order.objects.create(number="after")
    for words in (
        "domain 'archive' lives on database 'second'",
        "is on 'default'",
        "open transaction.atomic(using='second') around the send",
        "send from transaction.on_commit",
        "pass outside_transaction=True",
    ):
        assert words in str(caught.value)
    assert (caught.value.domain, caught.value.using, caught.value.open_on) == ("archive", "second", "default")
    assert nothing_was_sent()
    assert Order.objects.count() == 2  # the transaction was as usable as before


@both_committing
@way_of_sending
def test_a_send_outside_the_transaction_can_be_asked_for_and_stays_when_that_is_rolled_back(way: str) -> None:
    with transaction.atomic():
        WAYS[way](outside_transaction=True)
        transaction.set_rollback(True)
    assert Command.objects.using("second").count() == 1


@both_committing
def test_to_send_and_wait_is_to_send() -> None:
    def send_and_wait(**options: Any) -> None:
        send_command_and_wait("archive", "KeepOrder", uuid4(), {}, timeout=0, **options)

    with transaction.atomic():
        with pytest.raises(TransactionMismatchError):
            send_and_wait()
        with pytest.raises(TransactionMismatchError):
            async_to_sync(asend_command_and_wait)("archive", "KeepOrder", uuid4(), {}, timeout=0)
        assert nothing_was_sent()
        with pytest.raises(ReplyTimeoutError):
            send_and_wait(outside_transaction=True)
    with transaction.atomic(using="second"), pytest.raises(UncommittedCommandError):
        send_and_wait(outside_transaction=True)
    assert Command.objects.using("second").count() == 1


@both
def test_the_shell_refuses_too() -> None:
    ran = run("commandbus_send", "archive", "KeepOrder", "--data", "{}")
    assert ran.code == 0, ran.err
    with transaction.atomic():  # as call_command may be called
        ran = run("commandbus_send", "archive", "KeepOrder", "--data", "{}")
    assert (ran.code, "pass outside_transaction=True" in ran.err) == (1, True)
    assert Command.objects.using("second").count() == 1


@both_committing
def test_the_refusal_goes_both_ways() -> None:
    with transaction.atomic(using="second"):
        with pytest.raises(TransactionMismatchError, match="domain 'orders' lives on database 'default'"):
            send_command("orders", "PlaceOrder", uuid4(), {})
        with pytest.raises(UnknownDomainError, match="'ordres' is not registered"):
            send_command("ordres", "PlaceOrder", uuid4(), {})
    assert nothing_was_sent("default", "orders")


@both_committing
@pytest.mark.parametrize(("outer", "inner"), [("default", "second"), ("second", "default")])
def test_a_send_joins_its_own_transaction_although_another_is_open(outer: str, inner: str) -> None:
    with transaction.atomic(using=outer), transaction.atomic(using=inner):
        kept, placed = keep(), send_command("orders", "PlaceOrder", uuid4(), {})
        transaction.set_rollback(True, using="second")
    assert get_command("archive", kept) is None
    assert get_command("orders", placed) is not None


@both_committing
@pytest.mark.parametrize("committed", [True, False])
def test_a_send_from_on_commit_follows_the_other_transaction(committed: bool) -> None:
    with transaction.atomic():
        transaction.on_commit(keep)
        transaction.set_rollback(not committed)
    assert Command.objects.using("second").exists() is committed


@both
def test_the_transaction_that_is_opened_around_every_test_does_not_count() -> None:
    keep()
    send_command("orders", "PlaceOrder", uuid4(), {})
    with transaction.atomic(), pytest.raises(TransactionMismatchError):
        keep()  # although this test has a transaction on its database too
    assert Command.objects.using("second").count() == 1


@pytest.mark.integration
class TestCaseOfDjango(TestCase):
    """It opens two transactions per database: around the class and around the test."""

    databases = set(BOTH)  # noqa: RUF012 - as Django has it

    def test_its_transactions_do_not_count(self) -> None:
        keep()
        with transaction.atomic(), pytest.raises(TransactionMismatchError):
            keep()
        assert Command.objects.using("second").count() == 1


@pytest.fixture
def by_hand() -> Iterator[Callable[[str], None]]:
    """Switch autocommit off, for this test."""
    switched = []

    def switch_off(using: str) -> None:
        switched.append(using)
        transaction.set_autocommit(False, using=using)

    yield switch_off
    for using in switched:
        transaction.rollback(using=using)
        transaction.set_autocommit(True, using=using)


@both_committing
def test_a_transaction_that_is_managed_by_hand_on_another_database_is_a_reason_too(
    by_hand: Callable[[str], None],
) -> None:
    by_hand("default")
    with pytest.raises(TransactionMismatchError, match="is on 'default'"):
        keep()
    with transaction.atomic(using="second"):
        sent = keep()
    assert status(sent, "archive") == "PENDING"


@both_committing
def test_a_transaction_that_is_managed_by_hand_on_its_own_database_is_joined(by_hand: Callable[[str], None]) -> None:
    by_hand("second")
    with transaction.atomic():
        keep()
    transaction.rollback(using="second")
    assert nothing_was_sent()


@both_committing
def test_autocommit_that_the_settings_switch_off_counts_before_the_first_statement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep()
    monkeypatch.setitem(connections["second"].settings_dict, "AUTOCOMMIT", False)
    connections["second"].close()
    with transaction.atomic():
        keep()
    transaction.rollback(using="second")
    connections["second"].close()
    monkeypatch.undo()
    assert Command.objects.using("second").count() == 1


@both_committing
def test_the_check_opens_no_connection() -> None:
    """Not even the object of one, for a database that this thread has never used."""
    known: list[dict[str, bool]] = []

    def send_elsewhere() -> None:
        try:
            send_command("orders", "PlaceOrder", uuid4(), {})
            known.append({one.alias: one.connection is not None for one in connections.all(initialized_only=True)})
            connections["second"].close()
            send_command("orders", "PlaceOrder", uuid4(), {})
            known.append({one.alias: one.connection is not None for one in connections.all(initialized_only=True)})
        finally:
            connections.close_all()

    thread = threading.Thread(target=send_elsewhere)
    thread.start()
    thread.join()
    assert known == [{"default": True}, {"default": True, "second": False}]


@both_committing
@pytest.mark.parametrize("databases", [{}, {"orders": "default"}])
def test_nothing_is_refused_where_all_domains_live_on_one_database(databases: dict[str, str]) -> None:
    with override_settings(COMMANDBUS={"DATABASES": databases}), transaction.atomic(using="second"):
        sent = send_command("orders", "PlaceOrder", uuid4(), {})
        transaction.set_rollback(True, using="second")
    assert status(sent) == "PENDING"
