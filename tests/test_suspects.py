"""Which commands become suspects, and what becomes of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection, transaction
from django.utils import timezone

from commandbus import cancel_command, nodes, pause_domain
from commandbus.messages import ErrorInfo, Failure, Finish, Status
from commandbus.models import Command, Node, Suspect
from commandbus.pgmq import PgmqClient
from commandbus.testing.time import advance
from commandbus.transitions import PostgresTransitions
from tests.helpers import reload, running_worker, send, status, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def bus() -> PostgresTransitions:
    return PostgresTransitions("default")


def node(**changes: Any) -> UUID:
    node_id = uuid4()
    nodes.register("default", node_id=node_id, name="n", role="worker", domains=["orders"], handled_types={})
    Node.objects.filter(node_id=node_id).update(**{"heard_since": ago(3600), **changes})
    return node_id


def ago(seconds: float) -> Any:
    return timezone.now() - timedelta(seconds=seconds)


def suspects() -> list[UUID]:
    return list(Suspect.objects.order_by("since", "id").values_list("command_id", flat=True))


def make_suspect(bus: PostgresTransitions) -> UUID:
    command_id = send()
    dead = node(heartbeat_at=ago(3600))
    bus.receive("orders", qty=1, vt=30, node_id=dead)
    advance("orders", 31)
    assert bus.receive("orders", qty=1, vt=30, node_id=node()) == []
    assert suspects() == [command_id]
    return command_id


@pytest.mark.parametrize(
    ("changes", "suspected"),
    [
        ({"heartbeat_at": ago(60)}, True),
        ({"stopped_at": ago(0)}, True),
        ({}, False),
    ],
)
def test_only_what_a_dead_node_held_is_suspected(
    bus: PostgresTransitions, changes: dict[str, Any], suspected: bool
) -> None:
    command_id = send()
    bus.receive("orders", qty=1, vt=30, node_id=node(**changes))
    advance("orders", 100)
    received = bus.receive("orders", qty=1, vt=30, node_id=node())
    assert suspects() == ([command_id] if suspected else [])
    assert len(received) == (0 if suspected else 1)
    assert reload(command_id).attempts == (0 if suspected else 1)  # a delivery without a word is no attempt


def test_who_has_only_begun_judges_after_a_very_long_silence(bus: PostgresTransitions) -> None:
    """Where workers live for seconds only, as under cron, there is nobody who was heard of for longer."""
    command_id = send()
    holder = node(heartbeat_at=ago(300))
    bus.receive("orders", qty=1, vt=30, node_id=holder)
    advance("orders", 301)
    assert bus.receive("orders", qty=1, vt=30, node_id=newcomer()) == []
    assert suspects() == []
    advance("orders", 60)
    Node.objects.filter(node_id=holder).update(heartbeat_at=ago(360))
    assert bus.receive("orders", qty=1, vt=30, node_id=newcomer()) == []
    assert suspects() == [command_id]


def newcomer() -> UUID:
    node_id = uuid4()
    nodes.register("default", node_id=node_id, name="n", role="worker", domains=["orders"], handled_types={})
    return node_id


def test_who_has_missed_its_own_heartbeats_accuses_nobody(bus: PostgresTransitions) -> None:
    """The database stood still, for everybody. The first call that goes through must not be a verdict."""
    send()
    send()
    other, judge = node(heartbeat_at=ago(3600)), node(heartbeat_at=ago(3600))
    for node_id in (other, judge):
        bus.receive("orders", qty=1, vt=30, node_id=node_id)
    advance("orders", 3600)
    assert bus.receive("orders", qty=2, vt=30, node_id=judge) == []
    assert suspects() == []
    nodes.heartbeat("default", judge)  # from now on it waits for the signs of life of the others
    advance("orders", 2)
    assert bus.receive("orders", qty=2, vt=30, node_id=judge) == []
    assert suspects() == []


def test_a_holder_that_is_back_gets_the_time_to_extend_its_leases(bus: PostgresTransitions) -> None:
    command_id = send()
    holder = node(heartbeat_at=ago(100))
    bus.receive("orders", qty=1, vt=30, node_id=holder)
    advance("orders", 100)
    nodes.heartbeat("default", holder)
    assert bus.receive("orders", qty=1, vt=30, node_id=node()) == []
    Node.objects.filter(node_id=holder).update(heard_since=ago(40))  # it does not know of this one
    advance("orders", 2)
    [received] = bus.receive("orders", qty=1, vt=30, node_id=node())
    assert (received.command.command_id, suspects()) == (command_id, [])


def test_who_was_away_itself_calls_nobody_dead(bus: PostgresTransitions) -> None:
    """After an outage of the database every node is silent; the first one to come back must not accuse the others."""
    command_id = send()
    bus.receive("orders", qty=1, vt=30, node_id=node(heartbeat_at=ago(60)))
    advance("orders", 100)
    back = node(heartbeat_at=ago(60))
    nodes.heartbeat("default", back)
    assert bus.receive("orders", qty=1, vt=30, node_id=back) == []
    assert suspects() == []
    advance("orders", 1)
    Node.objects.filter(node_id=back).update(heard_since=ago(40))
    assert bus.receive("orders", qty=1, vt=30, node_id=back) == []
    assert suspects() == [command_id]


def test_a_lease_that_has_just_run_out_may_still_be_extended(bus: PostgresTransitions) -> None:
    command_id, holder = send(), node()
    [received] = bus.receive("orders", qty=1, vt=30, node_id=holder)
    advance("orders", 31)
    assert bus.receive("orders", qty=1, vt=30, node_id=node()) == []
    assert bus.extend("orders", [received.lease], 30) == {command_id: True}
    assert suspects() == []


def test_one_that_has_killed_and_whose_lease_nobody_knows_of_becomes_a_suspect_again(bus: PostgresTransitions) -> None:
    command_id = make_suspect(bus)
    Command.objects.update(crash_count=1)
    bus.receive_suspect("orders", vt=30, node_id=node())
    advance("orders", 100)
    assert bus.receive("orders", qty=1, vt=30, node_id=node()) == []
    assert suspects() == [command_id]
    assert reload(command_id).crash_count == 1


def test_a_suspect_that_is_given_back_stays_one(bus: PostgresTransitions) -> None:
    command_id = make_suspect(bus)
    [received] = bus.receive_suspect("orders", vt=30, node_id=node())
    bus.release("orders", [received.lease])
    assert bus.receive("orders", qty=1, vt=30, node_id=node()) == []
    assert suspects() == [command_id]


def test_nobody_is_suspected_of_what_we_have_killed_ourselves(bus: PostgresTransitions) -> None:
    command_id = make_suspect(bus)
    killed = node()
    bus.receive_suspect("orders", vt=30, node_id=killed)
    assert bus.node_died("orders", killed, [(0, 2**60)], killed=True) == (1, 0, 0)
    assert (reload(command_id).crash_count, reload(command_id).vanished_count) == (0, 0)


def test_a_node_that_is_not_in_the_table_any_more_is_dead(bus: PostgresTransitions) -> None:
    command_id = send()
    bus.receive("orders", qty=1, vt=30, node_id=uuid4())
    advance("orders", 31)
    assert bus.receive("orders", qty=1, vt=30, node_id=node()) == []
    assert suspects() == [command_id]


def test_a_suspect_is_leased_to_an_isolated_run_only(bus: PostgresTransitions) -> None:
    command_id = make_suspect(bus)
    assert bus.receive("orders", qty=10, vt=30, node_id=node()) == []
    [received] = bus.receive_suspect("orders", vt=30, node_id=node())
    assert (received.command.command_id, received.attempt) == (command_id, 1)
    assert received.command.data == {}
    assert suspects() == []
    assert bus.receive_suspect("orders", vt=30, node_id=node()) == []
    assert bus.finish("orders", [Finish(received.lease, Status.COMPLETED)]) == {command_id}


def test_a_suspect_that_fails_like_any_other_is_free_of_suspicion(bus: PostgresTransitions) -> None:
    command_id = make_suspect(bus)
    [received] = bus.receive_suspect("orders", vt=30, node_id=node())
    bus.fail("orders", [Failure(received.lease, ErrorInfo("E", "E", "e"), 0)])
    [received] = bus.receive("orders", qty=1, vt=30, node_id=node())
    assert (received.command.command_id, received.attempt) == (command_id, 2)


def test_one_that_has_killed_once_stays_isolated_also_after_it_failed(bus: PostgresTransitions) -> None:
    command_id = make_suspect(bus)
    killed = node()
    bus.receive_suspect("orders", vt=30, node_id=killed)
    assert bus.node_died("orders", killed) == (0, 1, 0)
    [received] = bus.receive_suspect("orders", vt=30, node_id=node())
    bus.fail("orders", [Failure(received.lease, ErrorInfo("E", "E", "e"), 0)])
    assert bus.receive("orders", qty=1, vt=30, node_id=node()) == []
    assert suspects() == [command_id]
    assert (reload(command_id).crash_count, reload(command_id).attempts) == (1, 1)


def test_a_death_that_is_reported_twice_counts_once(bus: PostgresTransitions) -> None:
    command_id = make_suspect(bus)
    killed = node()
    bus.receive_suspect("orders", vt=30, node_id=killed)
    assert bus.node_died("orders", killed) == (0, 1, 0)
    assert bus.node_died("orders", killed) == (0, 0, 0)
    assert reload(command_id).crash_count == 1


def test_an_isolated_run_that_vanished_counts_less_than_one_that_was_seen_to_die(bus: PostgresTransitions) -> None:
    command_id = make_suspect(bus)
    for _ in range(9):
        bus.receive_suspect("orders", vt=30, node_id=node(heartbeat_at=ago(3600)))
        advance("orders", 31)
        assert bus.receive("orders", qty=1, vt=30, node_id=node()) == []
    command = reload(command_id)
    assert (command.status, command.crash_count, command.vanished_count) == ("PENDING", 0, 9)
    bus.receive_suspect("orders", vt=30, node_id=node(heartbeat_at=ago(3600)))
    advance("orders", 31)
    bus.receive("orders", qty=1, vt=30, node_id=node())
    assert status(command_id) == "IN_TROUBLESHOOTING_QUEUE"


def test_what_was_running_is_suspected_and_the_rest_released(bus: PostgresTransitions) -> None:
    ids = [send() for _ in range(5)]
    dead = node()
    leases = [received.lease for received in bus.receive("orders", qty=5, vt=3600, node_id=dead)]
    bus.finish("orders", [Finish(leases[0], Status.COMPLETED)])
    started = [(leases[0].msg_id, leases[1].msg_id), (leases[3].msg_id, leases[3].msg_id)]
    assert bus.node_died("orders", dead, started) == (2, 2, 0)
    assert suspects() == [ids[1], ids[3]]
    again = bus.receive("orders", qty=5, vt=30, node_id=node())
    assert [received.command.command_id for received in again] == [ids[2], ids[4]]
    assert {received.attempt for received in again} == {1}
    assert Node.objects.get(node_id=dead).stopped_at is not None


def test_what_the_session_of_the_dead_has_still_locked_is_left_for_the_next_report(bus: PostgresTransitions) -> None:
    command_id, dead = send(), node()
    [received] = bus.receive("orders", qty=1, vt=3600, node_id=dead)
    started = [(received.lease.msg_id, received.lease.msg_id)]
    other = connection.copy()
    try:
        with transaction.atomic():
            list(Command.objects.select_for_update().filter(command_id=command_id))
            with other.cursor() as cursor:
                cursor.execute(
                    "SELECT * FROM commandbus.node_died('orders', %s, %s, %s)",
                    [dead, [received.lease.msg_id], [received.lease.msg_id]],
                )
                assert cursor.fetchone() == (0, 0, 1)
    finally:
        other.close()
    assert bus.node_died("orders", dead, started) == (0, 1, 0)


def test_a_worker_gives_back_only_what_it_does_not_know_of(bus: PostgresTransitions) -> None:
    ids, me = [send() for _ in range(3)], node()
    [first, *_] = bus.receive("orders", qty=2, vt=3600, node_id=me)
    bus.receive("orders", qty=1, vt=3600, node_id=node())
    assert bus.release_unknown("orders", me, [first.lease.msg_id]) == {ids[1]}
    assert status(ids[0]) == status(ids[2]) == "IN_PROGRESS"


def test_a_suspect_can_be_canceled(bus: PostgresTransitions) -> None:
    command_id = make_suspect(bus)
    cancel_command("orders", command_id, "never mind")
    assert bus.receive_suspect("orders", vt=30, node_id=node()) == []
    assert suspects() == []
    assert status(command_id) == "CANCELED"
    assert PgmqClient().metrics("orders__commands").queue_length == 0


def test_a_suspect_whose_message_is_gone_holds_up_nobody(bus: PostgresTransitions) -> None:
    command_id = make_suspect(bus)
    PgmqClient().delete("orders__commands", [reload(command_id).msg_id or 0])
    assert bus.receive_suspect("orders", vt=30, node_id=node()) == []
    assert suspects() == []


def test_suspects_of_a_paused_domain_wait(bus: PostgresTransitions) -> None:
    make_suspect(bus)
    pause_domain("orders")
    assert bus.receive_suspect("orders", vt=30, node_id=node()) == []


def test_a_suspect_that_was_forgotten_comes_back(bus: PostgresTransitions) -> None:
    command_id = make_suspect(bus)
    Suspect.objects.all().delete()
    advance("orders", 3600)
    assert bus.receive("orders", qty=1, vt=30, node_id=node()) == []
    assert suspects() == [command_id]


def test_a_worker_without_a_supervisor_runs_suspects_when_it_runs_nothing_else(bus: PostgresTransitions) -> None:
    command_id = make_suspect(bus)
    with running_worker():
        wait_until(lambda: status(command_id) == "COMPLETED")
    assert reload(command_id).suspect
