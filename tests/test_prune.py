"""Pruning removes commands, and their ids stay taken: alone, and against senders and other prunes at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TypeVar
from uuid import UUID, uuid4

import pytest
from django.db import connection, transaction
from django.db.models import F

from commandbus import (
    DuplicateCommandError,
    NewCommand,
    Status,
    UnknownDomainError,
    UnsupportedIsolationLevelError,
    send_command,
)
from commandbus.messages import ErrorInfo, Failure, Finish
from commandbus.models import Audit, Command, Domain, PayloadArchive, Tombstone
from commandbus.pgmq import PgmqClient
from commandbus.transitions import PostgresTransitions
from tests.helpers import PATIENCE, rows_read, send_many, wait_until

BUS = PostgresTransitions("default")
AGE = timedelta(days=30)
RETENTION = timedelta(days=7)

T = TypeVar("T")


def send(*command_ids: UUID, domain: str = "orders", n: int = 1) -> dict[UUID, str]:
    return BUS.send(domain, [NewCommand("Ship", command_id, {"n": n}) for command_id in command_ids])


def complete(*command_ids: UUID, domain: str = "orders") -> None:
    """Send commands, work them, and let them become old."""
    assert set(send(*command_ids, domain=domain).values()) == {"SENT"}
    work(domain)
    grow_old(*command_ids)


def work(domain: str = "orders") -> None:
    while received := BUS.receive(domain, qty=100, vt=30):
        BUS.finish(domain, [Finish(one.lease, Status.COMPLETED) for one in received])


def grow_old(*command_ids: UUID) -> None:
    commands = Command.objects.filter(command_id__in=command_ids)
    commands.update(created_at=F("created_at") - AGE, updated_at=F("updated_at") - AGE)


def prune(domain: str = "orders", qty: int = 100) -> int:
    return BUS.prune_commands(domain, datetime.now(UTC) - RETENTION, qty)


def ids(count: int) -> list[UUID]:
    """In the order in which one call inserts them."""
    return sorted(uuid4() for _ in range(count))


def events(command_id: UUID) -> list[str]:
    return list(Audit.objects.filter(command_id=command_id).order_by("audit_id").values_list("event_type", flat=True))


def times_processed(command_id: UUID) -> int:
    """How often it runs, once the queue is worked off."""
    work()
    assert PgmqClient().metrics("orders__commands").queue_length == 0
    return events(command_id).count("RECEIVED")


def commands() -> set[UUID]:
    return set(Command.objects.values_list("command_id", flat=True))


def tombstones() -> set[UUID]:
    return set(Tombstone.objects.values_list("command_id", flat=True))


class Session:
    """A connection of its own in a thread of its own, which does one thing after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.pid = self.do(_backend_pid)

    def do(self, work: Callable[[], T]) -> T:
        return self.start(work).result(PATIENCE)

    def start(self, work: Callable[[], T]) -> Future[T]:
        return self._thread.submit(work)

    def begin(self) -> None:
        self.do(lambda: transaction.set_autocommit(False))

    def end(self, how: str) -> None:
        self.do(transaction.commit if how == "commits" else transaction.rollback)

    def waits_for(self, other: Session) -> None:
        wait_until(lambda: _blockers(self.pid) == [other.pid], "the wait of one session for the other")

    def close(self) -> None:
        with connection.cursor() as cursor:  # it may still wait for another one, if the test has failed
            cursor.execute("SELECT pg_terminate_backend(%s)", [self.pid])
        self.do(lambda: connection.close())
        self._thread.shutdown()


def _backend_pid() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


def _blockers(pid: int) -> list[int]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_blocking_pids(%s)", [pid])
        return list(cursor.fetchone()[0])


@pytest.fixture
def session(transactional_db: None) -> Iterator[Callable[[], Session]]:
    opened: list[Session] = []

    def open_one() -> Session:
        opened.append(Session())
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.mark.django_db
def test_a_pruned_command_that_is_sent_again_is_a_duplicate_and_leaves_no_trace() -> None:
    command_id = uuid4()
    complete(command_id)
    before = events(command_id)
    assert prune() == 1
    assert send(command_id) == {command_id: "DUPLICATE"}
    assert send_command("orders", "Ship", command_id, {"n": 1}) == command_id
    assert commands() == set()
    assert events(command_id) == before == ["SENT", "RECEIVED", "COMPLETED"]
    assert times_processed(command_id) == 1


@pytest.mark.django_db
def test_a_pruned_command_with_other_content_is_a_conflict_and_nothing_of_the_call_is_written() -> None:
    command_id, innocent = ids(2)
    complete(command_id)
    prune()
    other_data = NewCommand("Ship", command_id, {"n": 2})
    other_type = NewCommand("Return", command_id, {"n": 1})
    for other in (other_data, other_type):
        assert BUS.send("orders", [other, NewCommand("Ship", innocent, {})]) == {command_id: "CONFLICT"}
    with pytest.raises(DuplicateCommandError, match=str(command_id)):
        send_command("orders", "Ship", command_id, {"n": 2})
    assert commands() == set()
    assert events(innocent) == []
    assert PgmqClient().metrics("orders__commands").queue_length == 0


@pytest.mark.django_db
def test_one_call_with_new_and_known_and_pruned_commands_sends_the_new_ones() -> None:
    new, known, pruned, another = uuid4(), uuid4(), uuid4(), uuid4()
    complete(pruned)
    assert prune() == 1
    send(known)
    assert send(pruned, new, known, another) == {
        new: "SENT",
        another: "SENT",
        known: "DUPLICATE",
        pruned: "DUPLICATE",
    }
    assert commands() == {new, known, another}
    assert [times_processed(command_id) for command_id in (new, known, pruned, another)] == [1, 1, 1, 1]


@pytest.mark.django_db
def test_the_payload_of_a_pruned_command_does_not_come_back() -> None:
    Domain.objects.update(archive_payloads=True)
    command_id, new = ids(2)
    complete(command_id)
    prune()
    send(command_id, new)
    assert [payload.command_id for payload in PayloadArchive.objects.all()] == [new]


@pytest.mark.parametrize("end", ["commits", "rolls back"])
@pytest.mark.parametrize(("n", "outcome"), [(1, "DUPLICATE"), (2, "CONFLICT")])
def test_a_send_that_waits_for_a_prune_knows_the_id_however_the_prune_ends(
    session: Callable[[], Session], end: str, n: int, outcome: str
) -> None:
    """The command comes and goes between the sender's first look and its insert: only a tombstone can tell."""
    first, contested = ids(2)
    gate, sender, pruner = session(), session(), session()
    gate.begin()
    gate.do(lambda: send(first))
    sending = sender.start(lambda: send(first, contested, n=n))
    sender.waits_for(gate)  # it has looked for both and found none
    complete(contested)
    pruner.begin()
    assert pruner.do(prune) == 1
    gate.end("rolls back")
    sender.waits_for(pruner)
    pruner.end(end)

    expected = {contested: "CONFLICT"} if outcome == "CONFLICT" else {first: "SENT", contested: "DUPLICATE"}
    assert sending.result(PATIENCE) == expected
    assert commands() == ({first} if outcome == "DUPLICATE" else set()) | (
        {contested} if end == "rolls back" else set()
    )
    assert tombstones() == ({contested} if end == "commits" else set())
    assert PgmqClient().metrics("orders__commands").queue_length == len(expected) - 1
    assert times_processed(contested) == 1


def test_a_command_that_is_pruned_right_after_it_stopped_an_insert_is_a_duplicate(
    session: Callable[[], Session],
) -> None:
    """The insert has met the command, and the statement after it meets the tombstone."""
    first, contested, last = ids(3)
    before, after, sender = session(), session(), session()
    before.begin()
    before.do(lambda: send(first))
    after.begin()
    after.do(lambda: send(last))
    sending = sender.start(lambda: send(first, contested, last))
    sender.waits_for(before)
    complete(contested)
    before.end("rolls back")
    sender.waits_for(after)
    assert prune() == 1
    after.end("rolls back")
    assert sending.result(PATIENCE) == {first: "SENT", contested: "DUPLICATE", last: "SENT"}
    assert commands() == {first, last}
    assert [times_processed(command_id) for command_id in (first, contested, last)] == [1, 1, 1]


@pytest.mark.parametrize("end", ["commits", "rolls back"])
def test_a_sender_that_still_sees_the_command_does_not_wait_for_its_prune(
    session: Callable[[], Session], end: str
) -> None:
    command_id = uuid4()
    complete(command_id)
    pruner = session()
    pruner.begin()
    assert pruner.do(prune) == 1
    assert send(command_id) == {command_id: "DUPLICATE"}
    assert send(command_id, n=2) == {command_id: "CONFLICT"}
    pruner.end(end)
    assert send(command_id) == {command_id: "DUPLICATE"}
    assert times_processed(command_id) == 1


@pytest.mark.parametrize(("end", "outcome"), [("commits", "DUPLICATE"), ("rolls back", "SENT")])
def test_of_two_twins_that_are_sent_at_once_one_is_processed(
    session: Callable[[], Session], end: str, outcome: str
) -> None:
    command_id = uuid4()
    first, second = session(), session()
    first.begin()
    assert first.do(lambda: send(command_id)) == {command_id: "SENT"}
    sending = second.start(lambda: send(command_id))
    second.waits_for(first)
    first.end(end)
    assert sending.result(PATIENCE) == {command_id: outcome}
    assert commands() == {command_id}
    assert PgmqClient().metrics("orders__commands").queue_length == 1
    assert times_processed(command_id) == 1


@pytest.mark.parametrize("end", ["commits", "rolls back"])
def test_two_twins_of_a_pruned_command_are_two_duplicates(session: Callable[[], Session], end: str) -> None:
    """The second waits for a row that the first has already taken back."""
    command_id = uuid4()
    complete(command_id)
    prune()
    first, second = session(), session()
    first.begin()
    assert first.do(lambda: send(command_id)) == {command_id: "DUPLICATE"}
    sending = second.start(lambda: send(command_id))
    second.waits_for(first)
    first.end(end)
    assert sending.result(PATIENCE) == {command_id: "DUPLICATE"}
    assert commands() == set()
    assert times_processed(command_id) == 1


@pytest.mark.django_db
@pytest.mark.parametrize("mark_in_progress", [True, False])
def test_only_old_and_resolved_commands_are_pruned(mark_in_progress: bool) -> None:
    Domain.objects.update(mark_in_progress=mark_in_progress)
    ends = {status: uuid4() for status in (Status.COMPLETED, Status.FAILED, Status.CANCELED)}
    for status, command_id in ends.items():
        send(command_id)
        [received] = BUS.receive("orders", qty=1, vt=30)
        BUS.finish("orders", [Finish(received.lease, status)])
    troubled = uuid4()
    send(troubled)
    [received] = BUS.receive("orders", qty=1, vt=30)
    BUS.fail("orders", [Failure(received.lease, ErrorInfo("Boom", "BOOM", "it went wrong"))])
    leased = uuid4()
    send(leased)
    BUS.receive("orders", qty=1, vt=30)
    waiting = uuid4()
    send(waiting)
    grow_old(*ends.values(), troubled, leased, waiting)
    elsewhere, young, resolved_lately = uuid4(), uuid4(), uuid4()
    complete(elsewhere, domain="other")
    send(resolved_lately)
    BUS.cancel("orders", [resolved_lately])
    Command.objects.filter(command_id=resolved_lately).update(created_at=F("created_at") - AGE)
    send(young)
    BUS.cancel("orders", [young])

    assert prune() == 3
    assert commands() == {troubled, leased, waiting, elsewhere, young, resolved_lately}
    assert tombstones() == set(ends.values())
    assert prune() == 0
    assert prune("other") == 1


@pytest.mark.django_db
def test_a_prune_takes_no_more_than_it_is_told_and_the_oldest_of_each_type_first() -> None:
    oldest = [uuid4() for _ in range(5)]
    for command_id in oldest:
        complete(command_id)
    returned = uuid4()
    BUS.send("orders", [NewCommand("Return", returned, {})])
    work()
    grow_old(returned)
    assert prune(qty=0) == 0
    assert prune(qty=2) == 2
    assert tombstones() == {returned, oldest[0]}
    assert prune(qty=3) == 3
    assert commands() == {oldest[4]}
    assert prune(qty=3) == 1
    assert prune(qty=3) == 0


@pytest.mark.django_db
def test_payloads_and_archived_messages_go_with_their_commands_and_no_others() -> None:
    Domain.objects.update(archive_payloads=True)
    old, young = uuid4(), uuid4()
    send(old)
    send(young)
    BUS.cancel("orders", [old, young])
    grow_old(old)
    archived = {command.command_id: command.msg_id or 0 for command in Command.objects.all()}
    assert prune() == 1
    assert PgmqClient().archived("orders__commands", archived[old]) is None
    assert PgmqClient().archived("orders__commands", archived[young]) is not None
    assert [payload.command_id for payload in PayloadArchive.objects.all()] == [young]
    assert events(old) == ["SENT", "CANCELED"]


@pytest.mark.django_db
def test_a_tombstone_says_what_its_command_was_and_when_it_went() -> None:
    command_id = uuid4()
    complete(command_id)
    command = Command.objects.get()
    start = datetime.now(UTC)
    prune()
    tombstone = Tombstone.objects.get(pk=("orders", command_id))
    assert bytes(tombstone.content_hash) == bytes(command.content_hash)
    assert not tombstone.unique_globally
    assert start < tombstone.pruned_at < datetime.now(UTC)
    assert str(tombstone) == f"orders/{command_id}"


@pytest.mark.django_db(transaction=True)
def test_a_prune_that_is_rolled_back_has_removed_nothing() -> None:
    Domain.objects.update(archive_payloads=True)
    command_id = uuid4()
    complete(command_id)
    with transaction.atomic():
        assert prune() == 1
        transaction.set_rollback(True)
    assert commands() == {command_id}
    assert tombstones() == set()
    assert PayloadArchive.objects.count() == 1


def test_a_locked_command_is_left_for_the_next_prune(session: Callable[[], Session]) -> None:
    locked, free = uuid4(), uuid4()
    complete(locked)
    complete(free)
    holder, pruner = session(), session()
    holder.begin()
    holder.do(lambda: list(Command.objects.select_for_update().filter(command_id=locked)))
    assert pruner.do(prune) == 1
    assert tombstones() == {free}
    holder.end("rolls back")
    assert prune() == 1
    assert tombstones() == {free, locked}


def test_prunes_at_the_same_time_share_the_work_and_wait_for_nobody(session: Callable[[], Session]) -> None:
    complete(*ids(10))
    first, second, third, late = session(), session(), session(), session()
    for one in (first, second, third):
        one.begin()
    assert first.do(lambda: prune(qty=4)) == 4
    assert second.do(lambda: prune(qty=4)) == 4
    assert third.do(lambda: prune(qty=4)) == 2
    assert late.do(prune) == 0
    second.end("commits")
    third.end("rolls back")
    first.end("commits")
    assert len(tombstones()) == 8
    assert prune() == 2
    assert commands() == set()
    assert len(tombstones()) == 10


def test_a_sender_that_waits_for_two_prunes_does_not_deadlock_with_them(session: Callable[[], Session]) -> None:
    """It wants them in the other order than the prunes have come to them."""
    first, low, high = ids(3)
    gate, sender, one, other = session(), session(), session(), session()
    gate.begin()
    gate.do(lambda: send(first))
    sending = sender.start(lambda: send(first, low, high))
    sender.waits_for(gate)
    complete(high)
    complete(low)
    one.begin()
    other.begin()
    assert one.do(lambda: prune(qty=1)) == 1
    assert other.do(lambda: prune(qty=1)) == 1
    gate.end("commits")
    sender.waits_for(other)
    other.end("commits")
    sender.waits_for(one)
    assert one.do(prune) == 0  # it goes on beside those who wait for it
    one.end("commits")
    assert sending.result(PATIENCE) == {first: "DUPLICATE", low: "DUPLICATE", high: "DUPLICATE"}
    assert commands() == {first}
    assert [times_processed(command_id) for command_id in (first, low, high)] == [1, 1, 1]


@pytest.mark.django_db
def test_a_pruned_id_is_taken_in_its_own_domain_only() -> None:
    command_id = uuid4()
    complete(command_id)
    prune()
    assert send(command_id, domain="other") == {command_id: "SENT"}


@pytest.mark.django_db
def test_with_global_scope_a_pruned_id_is_taken_in_every_domain() -> None:
    Domain.objects.update(unique_globally=True)
    command_id, innocent = uuid4(), uuid4()
    complete(command_id)
    prune()
    assert Tombstone.objects.get().unique_globally
    assert send(command_id) == {command_id: "DUPLICATE"}
    assert send(command_id, n=2) == {command_id: "CONFLICT"}
    assert send(command_id, innocent, domain="other") == {command_id: "CONFLICT"}
    assert commands() == set()
    assert PgmqClient().metrics("other__commands").queue_length == 0


@pytest.mark.django_db
def test_the_scope_in_which_a_command_was_sent_outlives_it() -> None:
    command_id, everywhere = uuid4(), uuid4()
    complete(command_id)
    prune()
    Domain.objects.update(unique_globally=True)
    complete(everywhere)
    prune()
    assert send(command_id, domain="other") == {command_id: "SENT"}
    assert send(command_id) == {command_id: "DUPLICATE"}
    Domain.objects.update(unique_globally=False)
    assert send(everywhere, domain="other") == {everywhere: "SENT"}


@pytest.mark.parametrize("end", ["commits", "rolls back"])
def test_with_global_scope_a_send_that_waits_for_a_prune_in_another_domain_is_a_conflict(
    session: Callable[[], Session], end: str
) -> None:
    Domain.objects.update(unique_globally=True)
    first, contested = ids(2)
    gate, sender, pruner = session(), session(), session()
    gate.begin()
    gate.do(lambda: send(first))
    sending = sender.start(lambda: send(first, contested))
    sender.waits_for(gate)
    complete(contested, domain="other")
    pruner.begin()
    assert pruner.do(lambda: prune("other")) == 1
    gate.end("rolls back")
    sender.waits_for(pruner)
    pruner.end(end)
    assert sending.result(PATIENCE) == {contested: "CONFLICT"}
    assert commands() == ({contested} if end == "rolls back" else set())
    assert PgmqClient().metrics("orders__commands").queue_length == 0


@pytest.mark.django_db
@pytest.mark.parametrize("warm", [False, True], ids=["fresh plan", "plan of an empty table"])
def test_a_prune_of_few_among_many_reads_few(warm: bool) -> None:
    """Neither what is young, nor what is old in another domain, nor what is already pruned."""
    if warm:
        for _ in range(10):
            prune()
    for command_type in ("Return", "Ship"):
        send_many("orders", command_type, 30)
        send_many("other", command_type, 1500)
    Command.objects.update(status="COMPLETED", created_at=F("created_at") - AGE, updated_at=F("updated_at") - AGE)
    for command_type in ("Return", "Ship"):
        send_many("orders", command_type, 1500)
    before = rows_read("command_bus_command")
    assert prune(qty=10) == 10
    assert prune(qty=100) == 50
    assert prune(qty=100) == 0
    assert rows_read("command_bus_command") - before < 600


@pytest.mark.django_db
@pytest.mark.parametrize("unique_globally", [False, True])
def test_a_send_reads_no_tombstone_but_its_own_however_many_there_are(unique_globally: bool) -> None:
    """Also with the plans that its session has kept since there was none."""
    Domain.objects.update(unique_globally=unique_globally)
    pruned = uuid4()
    complete(pruned)
    prune()
    for _ in range(10):
        send(uuid4(), pruned)
    Tombstone.objects.bulk_create(
        Tombstone(
            domain=domain,
            command_id=uuid4(),
            content_hash=32 * b"x",
            unique_globally=unique_globally,
            pruned_at=datetime.now(UTC),
        )
        for domain in ("orders", "other")
        for _ in range(1500)
    )
    before = rows_read("command_bus_tombstone")
    send(*ids(10), pruned)
    assert rows_read("command_bus_tombstone") - before <= 2  # by its domain, and by its id alone


@pytest.mark.django_db
def test_an_unknown_domain_is_named() -> None:
    with pytest.raises(UnknownDomainError, match="'nowhere' is not registered"):
        prune("nowhere")


@pytest.mark.django_db(transaction=True)
def test_a_prune_needs_read_committed_like_every_transition() -> None:
    def try_it() -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            prune()

    with pytest.raises(UnsupportedIsolationLevelError):
        try_it()
