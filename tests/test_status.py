from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.conf import settings
from django.db import OperationalError, connection, connections
from django.db.models.functions import Now
from django.test import override_settings

from commandbus import UnknownDomainError, nodes, pause_domain, send_command, status
from commandbus.messages import ErrorInfo, Failure, Finish, Status
from commandbus.models import Command, Domain, Node
from commandbus.pgmq import PgmqClient
from commandbus.status import DomainStatus, domain_statuses, node_statuses, overview
from commandbus.testing.time import advance
from commandbus.transitions import PostgresTransitions
from tests.helpers import BOTH, send, send_many, wait_until

pytestmark = pytest.mark.django_db(databases=BOTH)

BUS = PostgresTransitions("default")
ERROR = ErrorInfo("E", "E", "e")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let counts end at 10."""
    monkeypatch.setattr(status, "AT_MOST", 10)
    return 10


def orders() -> DomainStatus:
    [found] = domain_statuses(["orders"])
    return found


def node(name: str = "worker-1", **fields: Any) -> UUID:
    node_id = uuid4()
    nodes.register("default", node_id=node_id, name=name, role="worker", domains=["orders"], handled_types={})
    Node.objects.filter(node_id=node_id).update(**fields)
    return node_id


def receive(count: int, node_id: UUID | None = None) -> list[Any]:
    received = BUS.receive("orders", qty=count, vt=30, node_id=node_id)
    assert len(received) == count
    return [one.lease for one in received]


def test_an_empty_domain_has_nothing_to_do() -> None:
    assert orders() == DomainStatus(
        domain="orders",
        database="default",
        paused=False,
        waiting=0,
        delayed=0,
        running=0,
        in_troubleshooting=0,
        replies=0,
        oldest_ready_seconds=None,
    )


def test_every_command_is_counted_where_it_is() -> None:
    for _ in range(10):
        send()
    node_id = node()
    completed, *others = receive(1 + 2 + 3, node_id)
    BUS.finish("orders", [Finish(completed, Status.COMPLETED)])
    BUS.fail("orders", [Failure(lease, ERROR) for lease in others[:2]])
    BUS.fail("orders", [Failure(others[2], ERROR, delay=60)])
    send_command("orders", "PlaceOrder", uuid4(), {}, delay=60)
    found = orders()
    assert (found.waiting, found.delayed, found.running) == (4, 2, 2)
    assert (found.in_troubleshooting, found.replies) == (2, 1)
    assert found.held == {node_id: 2}
    assert found.more == frozenset()


def test_leases_count_also_where_they_are_not_shown_as_a_status() -> None:
    with override_settings(COMMANDBUS={"MARK_IN_PROGRESS": False}):
        from commandbus.install import register_domains

        register_domains("default")
    send()
    receive(1)
    assert Command.objects.get().status == "PENDING"
    assert (orders().running, orders().held) == (1, {})  # by hand, without a node


def test_a_lease_that_has_run_out_waits_again() -> None:
    send()
    receive(1, node())
    advance("orders", 40)
    assert (orders().waiting, orders().running) == (1, 0)


def test_the_oldest_that_is_ready_tells_how_long_it_is_so() -> None:
    send_command("orders", "PlaceOrder", uuid4(), {}, delay=60)
    assert orders().oldest_ready_seconds is None
    advance("orders", 100)
    age = orders().oldest_ready_seconds
    assert age is not None
    assert age >= 40


def test_a_message_that_is_no_command_stops_nothing() -> None:
    client = PgmqClient()
    client.send("orders__commands", {"no": "command"})
    client.read("orders__commands", vt=60)
    assert (orders().delayed, orders().running) == (1, 0)


def test_paused_domains_say_so() -> None:
    pause_domain("orders")
    assert orders().paused


def test_a_queue_that_is_gone_is_unknown_and_hides_nothing_else() -> None:
    client = PgmqClient()
    for queue in ("orders__commands", "orders__replies"):
        client.drop_queue(queue)
    found = orders()
    assert (found.waiting, found.delayed, found.running, found.replies) == (None, None, None, None)
    assert found.in_troubleshooting == 0


def test_counts_end_where_they_are_told_to(few: int) -> None:
    for _ in range(2):
        send_many("orders", "PlaceOrder", 11)
        received = BUS.receive("orders", qty=11, vt=60, node_id=None)
        BUS.fail("orders", [Failure(one.lease, ERROR) for one in received])
    send_many("orders", "PlaceOrder", 22)
    [BUS.finish("orders", [Finish(lease, Status.COMPLETED)]) for lease in receive(11)]
    receive(11)
    send_many("orders", "PlaceOrder", 11)
    found = orders()
    assert (found.waiting, found.in_troubleshooting, found.replies, found.running) == (few, few, few, few)
    assert found.more == {"waiting", "in_troubleshooting", "replies", "running"}


def test_exactly_as_many_as_the_limit_are_not_more(few: int) -> None:
    send_many("orders", "PlaceOrder", few)
    assert (orders().waiting, orders().more) == (few, frozenset())


def test_leases_are_found_before_messages_that_wait_for_longer(few: int) -> None:
    send()
    send()
    node_id = node()
    receive(2, node_id)
    for _ in range(30):
        send_command("orders", "PlaceOrder", uuid4(), {}, delay=7200)
    found = orders()
    assert (found.running, found.held) == (2, {node_id: 2})
    assert (found.delayed, found.more) == (few, frozenset({"delayed"}))


def test_leases_may_hide_behind_messages_that_wait_for_less(few: int) -> None:
    send()
    receive(1, node())
    for _ in range(30):
        send_command("orders", "PlaceOrder", uuid4(), {}, delay=5)
    found = orders()
    assert (found.running, found.more) == (0, frozenset({"delayed", "running"}))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("state", ["ready", "leased", "delayed"])
def test_what_it_reads_does_not_grow_with_what_there_is(state: str) -> None:
    """Not even under plans that were made while everything was empty, nor for another domain's sake."""
    for _ in range(10):
        rows_met()
    for domain in ("orders", "other"):
        send_many(domain, "PlaceOrder", 8000)
        received = BUS.receive(domain, qty=8000, vt=3600)
        BUS.finish(domain, [Finish(one.lease, Status.COMPLETED) for one in received[:4000]])
        BUS.fail(domain, [Failure(one.lease, ERROR) for one in received[4000:]])
        send_many(domain, "PlaceOrder", 4000)
    if state == "leased":
        BUS.receive("orders", qty=4000, vt=3600)
    elif state == "delayed":
        PgmqClient().shift_visibility("orders__commands", -timedelta(hours=1))
    # Nine looks at eleven at most leave no room for dead ones, which an analysis under way may keep for a while.
    wait_until(lambda: rows_met() < 100, "a call that meets fewer than 100")


def rows_met() -> int:
    """The rows and entries of indexes that one call meets, where counts end at 10."""
    tables = ("command_bus_command", "q_orders__commands", "q_orders__replies")
    counted = """
        SELECT pg_stat_force_next_flush(),
               (SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE relname = ANY (%(tables)s))
               + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relname = ANY (%(tables)s))
    """
    with connection.cursor() as cursor:
        for table in tables:  # those that are dead are in the way of whoever comes first
            cursor.execute(f"VACUUM {'' if table.startswith('command') else 'pgmq.'}{table}")
        met = []
        for _ in range(2):
            cursor.execute("SELECT * FROM commandbus.domain_status('orders', 10)")
            cursor.execute(counted, {"tables": list(tables)})
            cursor.execute(counted, {"tables": list(tables)})  # after the flush
            met.append(int(cursor.fetchone()[1]))
    return met[1] - met[0]


def test_all_domains_are_shown_in_the_order_of_their_names() -> None:
    shown = [(found.database, found.domain) for found in domain_statuses()]
    names = {using: sorted(Domain.objects.using(using).values_list("name", flat=True)) for using in BOTH}
    assert shown == [(using, name) for using in BOTH for name in names[using]]
    assert {("default", "orders"), ("second", "archive")} <= set(shown)


def test_a_reply_queue_that_is_handled_is_shown_like_a_domain() -> None:
    PgmqClient().send("sales__replies", {})
    [found] = domain_statuses(["sales__replies"])
    assert (found.waiting, found.replies) == (1, None)


def test_an_unknown_domain_is_named_with_those_that_there_are() -> None:
    with pytest.raises(UnknownDomainError, match="'nowhere' is not registered; known: orders, other, payments"):
        overview(["orders", "nowhere"])


def test_nodes_are_alive_late_or_have_just_stopped() -> None:
    send()
    alive = node("a")
    receive(1, alive)
    node("b", heartbeat_at=Now() - timedelta(seconds=36))
    node("c", heartbeat_at=Now() - timedelta(seconds=36), heartbeat_seconds=11)
    node("d", stopped_at=Now() - timedelta(minutes=59))
    node("e", stopped_at=Now() - timedelta(minutes=61))
    node("f", heartbeat_at=Now() - timedelta(hours=25))
    found = node_statuses()
    assert [(one.name, one.state) for one in found] == [("a", "alive"), ("b", "late"), ("c", "alive"), ("d", "stopped")]
    assert [one.held for one in found] == [1, 0, 0, 0]
    assert found[1].heartbeat_seconds_ago >= 36
    registered = Node.objects.get(node_id=alive)
    assert (found[0].host, found[0].pid, found[0].role) == (registered.host, registered.pid, "worker")
    assert found[0].domains == ("orders",)


def test_of_some_domains_only_the_nodes_that_serve_them_are_shown() -> None:
    node("a")
    node("b", domains=["other", "payments"])
    assert [one.name for one in overview().nodes] == ["a", "b"]
    assert [one.name for one in overview(["other"]).nodes] == ["b"]


@pytest.fixture
def second_database(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Another alias, which domain "faraway" lives on. Whoever uses it says where it is."""
    description = {**connections.settings["default"], "HOST": "/nonexistent"}
    monkeypatch.setitem(settings.DATABASES, "third", description)
    monkeypatch.setitem(connections.settings, "third", description)

    def ensure_connection() -> None:
        if connections["third"].connection is None:
            with connections["third"].wrap_database_errors:
                connections["third"].connect()

    # Tests may use only the databases that they name, and this one does not exist when they do.
    monkeypatch.setattr(connections["third"], "ensure_connection", ensure_connection)
    with override_settings(COMMANDBUS={"DATABASES": {"faraway": "third"}}):
        yield connections["third"].settings_dict
    connections["third"].close()
    del connections["third"]


def test_a_database_that_is_away_hides_no_other(second_database: dict[str, Any]) -> None:
    seen = overview()
    assert "orders" in [found.domain for found in seen.domains]
    assert list(seen.away) == ["third"]
    assert "/nonexistent" in seen.away["third"]
    with pytest.raises(OperationalError):
        domain_statuses()
    assert overview(["orders"]).away == {}


def test_a_database_without_our_functions_says_what_to_do(second_database: dict[str, Any]) -> None:
    second_database.update(HOST=connection.settings_dict["HOST"], NAME="postgres")
    [why] = overview(["faraway"]).away.values()
    assert 'relation "command_bus_domain" does not exist' in why
    assert why.endswith("; run: manage.py migrate")


def test_a_domain_that_has_moved_is_shown_where_it_lives_now(second_database: dict[str, Any]) -> None:
    second_database.update(HOST=connection.settings_dict["HOST"], NAME="postgres")
    with override_settings(COMMANDBUS={"DATABASES": {"orders": "third"}}):
        assert "orders" not in [found.domain for found in overview().domains]


def test_databases_of_other_kinds_are_left_alone(
    second_database: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections["third"], "vendor", "sqlite")
    assert overview().away == {}


def test_in_a_transaction_of_the_caller_its_connection_is_left_open() -> None:
    with connection.cursor() as cursor:
        cursor.execute("DROP FUNCTION commandbus.domain_status")
    assert list(overview().away) == ["default"]
    assert connection.in_atomic_block
