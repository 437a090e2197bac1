"""Finding commands, on few of them; tests/admin/test_bounds.py has many."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection
from django.utils import timezone

from commandbus import cancel_batch, open_batch, seal_batch, send_command
from commandbus.messages import BatchStatus, Status
from commandbus.models import Audit, Batch, Command
from commandbus.pgmq import PgmqClient
from commandbus.search import BatchSearch, Found, Search, commands_of, estimated_total, find, find_audit, find_batches
from tests.admin.pages import BUS, troubled
from tests.batches.helpers import fail, finish, fold_batches, make, receive
from tests.helpers import rows_read, send, send_many

pytestmark = pytest.mark.django_db


def found(search: Search, **options: Any) -> list[UUID]:
    result = find(search, "default", **options)
    return [command.command_id for command in commands_of(result, "default")]


def test_everything_is_found_newest_first_or_oldest_first() -> None:
    ids = [send() for _ in range(3)]
    assert found(Search()) == ids[::-1]
    oldest = find(Search(), "default", oldest_first=True)
    assert [one.command_id for one in commands_of(oldest, "default", oldest_first=True)] == ids
    assert not oldest.more


@pytest.mark.parametrize("oldest_first", [False, True])
def test_one_search_leads_on_to_the_next(oldest_first: bool) -> None:
    """Whatever was cut, by matches or by what was looked through, is met when one goes on."""
    for number in range(12):
        send_command("orders" if number % 3 else "other", f"Type{number % 4}", uuid4(), {})
    for search in (
        Search(),
        Search(domains=("orders",)),
        Search(text="Type1"),
        Search(domains=("other",), text="Type3"),
    ):
        everything = find(search, "default", oldest_first=oldest_first)
        assert everything.rows
        assert not everything.more
        for options in ({"at_most": 2}, {"look_through": 2}, {"at_most": 1, "look_through": 3}):
            rows: list[int] = []
            step: Found | None = None
            while step is None or step.more:
                beyond = None if step is None else step.beyond
                step = find(search, "default", oldest_first=oldest_first, beyond=beyond, **options)
                assert step.beyond != beyond or not step.more, "it does not get on"
                rows += step.rows
            assert rows == everything.rows


def test_by_id_or_its_beginning() -> None:
    first, second = UUID("0192aaaa-bbbb-7000-8000-000000000001"), UUID("0192aaaa-cccc-7000-8000-000000000002")
    for one in (first, second):
        send_command("orders", "PlaceOrder", one, {})
    send()
    assert found(Search(text=str(first))) == [first]
    assert found(Search(text=first.hex.upper())) == [first]
    assert found(Search(text="0192aaaa")) == [second, first]
    assert found(Search(text=" 0192aaaa-c ")) == [second]
    assert found(Search(text="0192AAAA-bbbb-7000-8000-0000")) == [first]
    assert found(Search(text="0192aaaa", domains=("other",))) == []
    assert found(Search(text="0192aaaa", status=Status.FAILED)) == []
    assert find(Search(text="0192aaaa"), "default", at_most=1).more
    assert found(Search(text="0192aaad")) == []


def test_by_correlation_id_with_the_command_that_began() -> None:
    first = send()
    second = send_command("other", "Follow", uuid4(), {}, correlation_id=first)
    other = uuid4()
    third = send_command("orders", "PlaceOrder", other, {}, correlation_id=uuid4())
    assert found(Search(text=str(first))) == [second, first]
    assert found(Search(text=str(first), domains=("other",))) == [second]
    assert found(Search(text=str(other))) == [third]
    assert found(Search(either_id=first)) == [second, first]
    assert found(Search(text=str(uuid4()))) == []


def test_by_a_part_of_the_type_or_the_error_code() -> None:
    failed = troubled("SendMail", code="NO_STAMP")
    placed = send("PlaceOrder")
    mail = send("SendMail")
    assert found(Search(text="mail")) == [mail, failed]
    assert found(Search(text="no_st")) == [failed]
    assert found(Search(text="placeorder")) == [placed]
    unknown = send("NobodyHandlesThis")
    assert found(Search(text="NobodyHandlesThis")) == [unknown]  # not in the registry, so only as a whole
    assert found(Search(text="mail", command_types=("PlaceOrder",))) == []
    assert found(Search(text="nothing")) == []


def test_by_what_happened_to_it() -> None:
    troubles = [troubled(code="A", kind="One"), troubled(code="B", kind="Two")]
    ended = send()
    Command.objects.filter(command_id=ended).update(status="FAILED", attempts=4, last_error_type="One")
    running = send()
    node = uuid4()
    BUS.receive("orders", qty=2, vt=30, node_id=node)  # the first is the message of what has ended
    waiting = send()
    assert found(Search(status=Status.IN_TROUBLESHOOTING_QUEUE)) == troubles[::-1]
    assert found(Search(status=Status.FAILED)) == [ended]
    assert found(Search(status=Status.IN_PROGRESS)) == found(Search(running=True)) == [running]
    assert found(Search(status=Status.PENDING)) == [waiting]
    assert found(Search(status=Status.COMPLETED)) == []
    assert found(Search(error_types=("One",))) == [ended, troubles[0]]
    assert found(Search(error_codes=("B",))) == [troubles[1]]
    assert found(Search(least_attempts=2)) == [ended]
    assert found(Search(node_ids=(node,))) == [running]
    assert found(Search(running=True, node_ids=(uuid4(),))) == []
    assert found(Search(error_types=("One",), status=Status.FAILED)) == [ended]


def test_what_runs_is_found_whatever_its_status_shows() -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE command_bus_domain SET mark_in_progress = false WHERE name = 'orders'")
    running = send()
    BUS.receive("orders", qty=1, vt=30)
    waiting = send()
    assert found(Search(status=Status.PENDING)) == [waiting, running]
    assert found(Search(running=True)) == [running]


@pytest.mark.parametrize("oldest_first", [False, True])
def test_of_many_that_wait_the_newest_are_found_or_the_oldest(oldest_first: bool) -> None:
    send_many("orders", "PlaceOrder", 2500)
    rows: list[int] = []
    step = find(Search(status=Status.PENDING), "default", oldest_first=oldest_first)
    while (beyond := step.beyond) is not None:
        rows += step.rows
        step = find(Search(status=Status.PENDING), "default", oldest_first=oldest_first, beyond=beyond)
        assert step.beyond != beyond, "it does not get on"
    rows += step.rows
    assert rows == sorted(set(rows), reverse=not oldest_first)
    assert len(rows) == 2000
    assert step.more  # and it cannot be said where they are


def test_what_runs_is_found_behind_what_is_delayed_and_when_its_lease_is_over() -> None:
    running = send()
    BUS.receive("orders", qty=1, vt=3600)
    expired = send()
    BUS.receive("orders", qty=1, vt=30)
    PgmqClient().shift_visibility("orders__commands", timedelta(minutes=5))
    assert found(Search(running=True)) == [expired, running]
    for _ in range(3):
        send_command("orders", "PlaceOrder", uuid4(), {}, delay=10)
    with connection.cursor() as cursor:
        domains = ["orders"]
        cursor.execute("SELECT cardinality(rows), is_cut FROM commandbus.search_live(%s, true, false, 3)", [domains])
        assert cursor.fetchone() == (1, True)  # what is delayed is in the way, and that is said


def test_a_name_that_looks_like_the_beginning_of_an_id_is_both() -> None:
    by_id = UUID("feedfeed-0000-4000-8000-000000000001")
    send_command("orders", "PlaceOrder", by_id, {})
    by_type = send_command("orders", "feed", uuid4(), {})
    assert found(Search(text="feed")) == [by_type, by_id]


def test_by_time() -> None:
    now = timezone.now()
    ids = [send() for _ in range(4)]
    for number, one in enumerate(ids):
        at = now - timedelta(days=10 - number)
        Command.objects.filter(command_id=one).update(created_at=at, updated_at=at + timedelta(hours=1))
    between = Search(created_from=now - timedelta(days=9.5), created_until=now - timedelta(days=7.5))
    assert found(between) == [ids[2], ids[1]]
    assert found(Search(updated_until=now - timedelta(days=8.5))) == [ids[1], ids[0]]
    assert found(Search(updated_from=now - timedelta(days=7.5))) == [ids[3]]
    assert found(Search(created_from=now)) == []
    assert found(Search(created_until=now - timedelta(days=100))) == []


def test_a_domain_with_very_many_types_is_searched_too() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT commandbus.send('orders', ARRAY(SELECT gen_random_uuid() FROM generate_series(1, 1100)),"
            " ARRAY(SELECT 'Type' || n FROM generate_series(1, 1100) AS n), array_fill('{}'::jsonb, ARRAY[1100]))"
        )
    send_command("other", "Else", uuid4(), {})
    result = find(Search(domains=("orders",)), "default", at_most=2000)
    assert len(result.rows) == 1100
    assert not result.more


def test_the_estimate_follows_what_is_asked_for() -> None:
    send_many("orders", "PlaceOrder", 500)
    send_many("other", "PlaceOrder", 50)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE command_bus_command")
    assert estimated_total(Search(), "default") == 550
    assert estimated_total(Search(domains=("other",)), "default") == 50


@pytest.mark.parametrize("oldest_first", [False, True])
def test_the_audit_is_found_by_command_operator_event_domain_and_time(oldest_first: bool) -> None:
    command_id = troubled()
    BUS.operator_retry("orders", [command_id], "olga", "again")
    BUS.pause("orders", True, "kim")
    send_command("other", "PlaceOrder", uuid4(), {})

    def events(**conditions: Any) -> list[str]:
        rows, _ = find_audit("default", oldest_first=oldest_first, **conditions)
        names = [row.event_type for row in rows]
        return names if oldest_first else names[::-1]

    assert events(text=str(command_id)) == ["SENT", "RECEIVED", "MOVED_TO_TROUBLESHOOTING_QUEUE", "OPERATOR_RETRY"]
    assert events(text="olga") == ["OPERATOR_RETRY"]
    assert events(text="kim") == ["DOMAIN_PAUSED"]
    assert events(text="nobody") == []
    assert events(text="olga", event_type="OPERATOR_CANCEL") == []
    assert events(event_type="SENT") == ["SENT", "SENT"]
    assert events(event_type="SENT", domain="other") == ["SENT"]
    assert len(events()) == 6
    Audit.objects.filter(event_type="SENT").update(ts=timezone.now() - timedelta(days=3))
    assert events(since=timezone.now() - timedelta(days=1)) == events()[1:-1]


def test_a_search_of_the_audit_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        command_id = troubled()
        BUS.operator_retry("orders", [command_id], "olga")
        BUS.operator_cancel("orders", [command_id], "no", "olga")
        BUS.receive("orders", qty=1, vt=30)
        BUS.pause("orders", True, "olga")
        BUS.pause("orders", False, "olga")
    searches: list[dict[str, Any]] = [{}, {"text": "olga"}, {"event_type": "OPERATOR_RETRY"}]
    for conditions in searches:
        everything = find_audit("default", **conditions)[1]
        assert not everything.more
        for name, value in (("AT_MOST", 2), ("LOOK_THROUGH", 12)):
            with monkeypatch.context() as patch:
                patch.setattr(f"commandbus.search.{name}", value)
                rows: list[int] = []
                step = Found(more=True)
                while step.more:
                    beyond = step.beyond
                    step = find_audit("default", beyond=beyond, **conditions)[1]
                    assert step.beyond != beyond or not step.more, "it does not get on"
                    rows += step.rows
            assert rows == everything.rows


def of(batch_id: UUID, *statuses: str) -> list[UUID]:
    commands = Command.objects.filter(batch_id=batch_id, status__in=statuses).order_by("-id")
    return list(commands.values_list("command_id", flat=True))


def test_by_batch() -> None:
    other, batch_id = make(2), make(6)
    send()
    BUS.cancel("orders", of(other, "PENDING"))
    one, two, three, four = receive(4)
    finish([one])
    finish([two], Status.FAILED)
    fail([three])
    assert len(found(Search(batch_id=batch_id))) == 6
    assert found(Search(text=str(batch_id))) == found(Search(batch_id=batch_id))
    assert found(Search(text=str(batch_id), batch_id=other)) == []
    for status in Status:
        assert found(Search(batch_id=batch_id, status=status)) == of(batch_id, status), status
    assert found(Search(batch_id=batch_id, running=True)) == [four.command.command_id]
    assert found(Search(batch_id=batch_id, error_codes=("BAD",))) == of(batch_id, "FAILED", "IN_TROUBLESHOOTING_QUEUE")
    assert found(Search(batch_id=batch_id, text="placeorder")) == found(Search(batch_id=batch_id))
    assert found(Search(batch_id=batch_id, domains=("other",))) == []
    assert found(Search(batch_id=uuid4())) == []


@pytest.mark.parametrize("status", [None, Status.FAILED, Status.PENDING])
@pytest.mark.parametrize("oldest_first", [False, True])
def test_a_search_in_a_batch_goes_on_where_it_ended(status: Status | None, oldest_first: bool) -> None:
    make(3)
    batch_id = make(9)
    finish(receive(8)[3:], Status.FAILED)
    search = Search(batch_id=batch_id, status=status)
    everything = find(search, "default", oldest_first=oldest_first)
    for options in ({"at_most": 2}, {"look_through": 2}):
        rows: list[int] = []
        step = Found(more=True)
        while step.more:
            beyond = step.beyond
            step = find(search, "default", oldest_first=oldest_first, beyond=beyond, **options)
            assert step.beyond != beyond or not step.more, "it does not get on"
            rows += step.rows
        assert rows == everything.rows


def test_the_few_that_failed_of_many_are_found_by_reading_few() -> None:
    batch_id = make(3000)
    finish(receive(3), Status.FAILED)
    find(Search(batch_id=batch_id, status=Status.FAILED), "default")
    before = rows_read("command_bus_command")
    assert len(found(Search(batch_id=batch_id, status=Status.FAILED))) == 3
    assert rows_read("command_bus_command") - before < 20


def test_a_type_is_found_without_reading_the_others() -> None:
    for number in range(3):
        send_many("orders", f"Type{number}", 1000)
    before = rows_read("command_bus_command")
    assert len(found(Search(command_types=("Type1",)), at_most=10)) == 10
    assert found(Search(command_types=("Nothing",))) == []
    with connection.cursor() as cursor:
        cursor.execute("SELECT array_agg(command_type) FROM commandbus.types_of(ARRAY['orders'])")
        assert cursor.fetchone() == (["Type0", "Type1", "Type2"],)
    assert rows_read("command_bus_command") - before < 1100


def test_the_last_of_a_batch_that_wait_are_found_behind_all_that_have_ended() -> None:
    batch_id = make(30)
    waiting = of(batch_id, "PENDING")[-1]
    Command.objects.exclude(command_id=waiting).update(status="COMPLETED")
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM pgmq.q_orders__commands WHERE message ->> 'command_id' <> %s", [str(waiting)])
    result = find(Search(batch_id=batch_id, status=Status.PENDING), "default", look_through=2)
    assert len(result.rows) == 1
    assert not result.more


def test_of_more_that_wait_than_are_looked_at_those_of_a_batch_are_found() -> None:
    batch_id = make(5)
    send_many("orders", "PlaceOrder", 2100)  # before them in the queue of what is newest
    result = find(Search(batch_id=batch_id, status=Status.PENDING), "default")
    assert len(result.rows) == 5
    assert not result.more


def batches(search: BatchSearch, **options: Any) -> list[UUID]:
    return find_batches(search, "default", **options)[0]


def test_batches_are_found_newest_first_by_domain_status_name_id_and_time() -> None:
    running = make(2, name="Invoices of May")
    receive(1)
    waiting = make(1, name="invoices of june")
    ended = make(1, domain="other")
    finish(receive(1, "other"), domain="other")
    opened = open_batch("orders", batch_id=UUID("0192aaaa-bbbb-7000-8000-000000000001"))
    everything = [opened, ended, waiting, running]
    assert batches(BatchSearch()) == everything
    assert batches(BatchSearch(), oldest_first=True) == everything[::-1]
    assert batches(BatchSearch(domain="orders")) == [opened, waiting, running]
    assert batches(BatchSearch(status=BatchStatus.IN_PROGRESS)) == [ended, running]  # not folded yet
    assert batches(BatchSearch(status=BatchStatus.PENDING)) == [opened, waiting]
    fold_batches()
    assert batches(BatchSearch(status=BatchStatus.IN_PROGRESS)) == [running]
    assert batches(BatchSearch(status=BatchStatus.COMPLETED)) == [ended]
    assert batches(BatchSearch(status=BatchStatus.COMPLETED_WITH_FAILURES)) == []
    assert batches(BatchSearch(text="INVOICES")) == [waiting, running]
    assert batches(BatchSearch(text=" invoices of m")) == [running]
    assert batches(BatchSearch(text="of may")) == []
    assert batches(BatchSearch(text="%")) == []
    assert batches(BatchSearch(text=str(ended))) == [ended]
    assert batches(BatchSearch(text=str(ended), domain="orders")) == []
    assert batches(BatchSearch(text="0192aaaa-b")) == [opened]
    assert batches(BatchSearch(text="0192aaaa", status=BatchStatus.COMPLETED)) == []
    assert batches(BatchSearch(text=str(uuid4()))) == []
    Batch.objects.filter(batch_id=waiting).update(created_at=timezone.now() - timedelta(days=3))
    since, until = timezone.now() - timedelta(days=4), timezone.now() - timedelta(days=2)
    assert batches(BatchSearch(created_from=since, created_until=until)) == [waiting]
    assert batches(BatchSearch(created_from=until)) == [opened, ended, running]


def test_a_name_that_looks_like_the_beginning_of_a_batch_id_is_both() -> None:
    by_id = open_batch("orders", batch_id=UUID("feedfeed-0000-4000-8000-000000000001"))
    by_name = make(1, name="feed")
    assert batches(BatchSearch(text="feed")) == [by_name, by_id]


@pytest.mark.parametrize("oldest_first", [False, True])
def test_a_search_of_batches_goes_on_where_it_ended(oldest_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(9):
        make(1, domain="orders" if number % 3 else "other", name="a" if number % 2 else "b")
    Batch.objects.filter(batch_id__in=batches(BatchSearch())[2:5]).update(created_at=timezone.now())  # at one moment
    for search in (BatchSearch(), BatchSearch(text="a"), BatchSearch(domain="orders", status=BatchStatus.PENDING)):
        everything, end = find_batches(search, "default", oldest_first=oldest_first)
        assert not end.more
        for name in ("AT_MOST", "LOOK_THROUGH"):
            with monkeypatch.context() as patch:
                patch.setattr(f"commandbus.search.{name}", 2)
                ids: list[UUID] = []
                step = Found(more=True)
                while step.more:
                    beyond = step.beyond
                    more, step = find_batches(search, "default", oldest_first=oldest_first, beyond=beyond)
                    assert step.beyond != beyond or not step.more, "it does not get on"
                    ids += more
            assert ids == everything, (search, name)


def test_the_audit_is_found_by_batch_and_by_who_sealed_or_canceled_it() -> None:
    sealed, canceled = open_batch("orders"), make(1)
    seal_batch("orders", sealed, operator="olga")
    cancel_batch("orders", canceled, "no", operator="kim")

    def events(text: str) -> list[str]:
        return [row.event_type for row in find_audit("default", text=text, oldest_first=True)[0]]

    assert "BATCH_SEALED" in events(str(sealed))
    assert [one for one in events(str(canceled)) if "BATCH" not in one] == []
    assert events("olga") == ["BATCH_SEALED"]
    assert events("kim") == ["BATCH_CANCELED", "CANCELED"]
