"""The list of batches, the page of a batch, and the ways to it from commands and the audit."""

from __future__ import annotations

import re
from datetime import timedelta
from html import unescape
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection, connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from commandbus import BatchCommand, cancel_batch, create_batch, open_batch, seal_batch, search, send_command
from commandbus.admin.progress import bar, pace
from commandbus.messages import Status
from commandbus.models import Audit, Batch, BatchDelta, Command
from commandbus.permissions import VIEWERS
from tests.admin.history import fill_batches
from tests.admin.pages import client_of, get, page_of, text_of, url
from tests.batches.helpers import batch, fail, finish, fold_batches, folded, make, receive, some
from tests.helpers import BOTH, rows_read, send, unreachable

pytestmark = pytest.mark.django_db(databases=BOTH)

LIST = "/admin/commandbus/batch/"
COMMANDS = "/admin/commandbus/command/"
AUDIT = "/admin/commandbus/audit/"
NASTY = "<script>alert('x')</script>"


def batch_page(batch_id: UUID, domain: str = "orders") -> str:
    return url("batch_change", f"{domain}/{batch_id}")


def listed(html: str) -> list[str]:
    return re.findall(r'<code class="cb-code">([0-9a-f-]{36})</code>', html)


def mixed(**options: Any) -> UUID:
    """A batch of 8: 3 completed, 1 failed, 1 canceled, 1 in troubleshooting, 1 runs, 1 waits. Not all is folded."""
    batch_id = make(8, **options)
    received = receive(7)
    finish(received[:2])
    fold_batches("default")
    finish(received[2:3])
    finish(received[3:4], Status.FAILED)
    finish(received[4:5], Status.CANCELED)
    fail(received[5:6])
    return batch_id


def callback(command_id: UUID) -> BatchCommand:
    return BatchCommand("AllDone", command_id, {"token": "s3cr3t"})


def test_the_list_shows_what_is_counted_now_newest_first(admin_client: Client) -> None:
    first = make(2, name="Mail to all")
    receive(2)
    second = mixed(name="Invoices of May")
    assert BatchDelta.objects.exists()
    html = get(admin_client, LIST)
    assert listed(html) == [str(second), str(first)]
    text = text_of(html)
    assert "Invoices of May orders" in text
    assert "3 completed, 1 failed, 1 canceled, 1 in troubleshooting, 2 waiting or running of 8" in text
    label = "3 completed, 1 failed, 1 canceled, 1 in troubleshooting, 2 waiting or running, of 8"
    assert f'role="img" aria-label="{label}"' in html
    assert text.count("In progress") >= 2
    assert batch_page(second) in html


def test_the_counts_of_a_whole_page_are_read_in_one_query(admin_client: Client) -> None:
    for number in range(12):
        make(1, name=f"batch {number}")
    with CaptureQueriesContext(connection) as many:
        get(admin_client, LIST)
    reads = [query["sql"] for query in many if "batch_now" in query["sql"]]
    assert len(reads) == 1
    assert not [query["sql"] for query in many if "COUNT(*)" in query["sql"] and " IN (" not in query["sql"]]
    with CaptureQueriesContext(connection) as few:
        assert len(listed(get(admin_client, LIST, {"q": "batch 3"}))) == 1
    assert len(many) == len(few)


def test_every_filter_narrows_the_list(admin_client: Client) -> None:
    invoices = str(make(1, name="Invoices"))
    receive(1)
    mail = str(make(1, domain="other", name="Mail"))
    searches = [{"q": "invo"}, {"q": invoices}, {"q": invoices[:30]}]
    for query in ({"domain": "orders"}, {"status": "IN_PROGRESS"}, *searches):
        assert listed(get(admin_client, LIST, query)) == [invoices], query
    assert listed(get(admin_client, LIST, {"status": "PENDING"})) == [mail]
    assert listed(get(admin_client, LIST, {"o": "2"})) == [invoices, mail]
    assert listed(get(admin_client, LIST, {"q": "nothing"})) == []
    Batch.objects.filter(batch_id=mail).update(created_at="2026-03-05 23:59:58Z")
    day = {"created_at__range__gte_0": "2026-03-05", "created_at__range__lte_0": "2026-03-05"}
    assert listed(get(admin_client, LIST, day)) == [mail]


@pytest.mark.parametrize("query", [{"status": "BOGUS"}, {"domain": "a\0b"}, {"beyond": "x"}, {"name": "x"}])
def test_what_cannot_be_meant_leads_to_the_whole_list(admin_client: Client, query: dict[str, str]) -> None:
    assert admin_client.get(LIST, query)["Location"] == f"{LIST}?e=1"


def test_a_long_list_says_so_and_leads_on(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "AT_MOST", 3)
    ids = [str(make(1)) for _ in range(5)]
    html = get(admin_client, LIST)
    assert listed(html) == ids[:1:-1]
    assert "These are the newest: 3. There are more." in text_of(html)
    [onward, _] = re.findall(r'<a href="(\?beyond=\d+)">look at', html)
    html = get(admin_client, LIST + onward)
    assert listed(html) == ids[1::-1]
    assert "There is nothing older" in text_of(html)


def test_batches_on_another_database_are_shown_from_there(admin_client: Client) -> None:
    here = str(make(1))
    there = create_batch("archive", some(1, "KeepOrder"), name="Old papers")
    assert listed(get(admin_client, LIST)) == [here]
    for query in ({"database": "second"}, {"domain": "archive"}):
        html = get(admin_client, LIST, query)
        assert listed(html) == [str(there)]
        assert batch_page(there, "archive") in html
    html = get(admin_client, batch_page(there, "archive"))
    assert "in database second" in html
    [link] = re.findall(r'href="(/admin/commandbus/command/\?[^"]*)" title="List all', html)
    assert len(listed(get(admin_client, unescape(link)))) == 1


@pytest.mark.django_db(transaction=True, databases=BOTH)
def test_a_list_of_a_database_that_is_away_leads_back_and_says_so(admin_client: Client) -> None:
    with unreachable("second"):
        response = admin_client.get(LIST, {"database": "second"}, follow=True)
        assert "The database second gave no answer" in response.content.decode()
        connections["second"].close()


def test_the_page_shows_all_that_is_known(admin_client: Client) -> None:
    batch_id = mixed(name="Invoices of May", custom_data={"month": "May", "api_key": "k-77"})
    html = get(admin_client, batch_page(batch_id))
    text = text_of(html)
    assert "<bdi>Invoices of May</bdi>" in html
    assert str(batch_id) in text
    assert "&quot;month&quot;: &quot;May&quot;" in html
    assert "k-77" not in html
    assert "••••••" in html
    for label, count in (("Completed", 3), ("Failed", 1), ("Canceled", 1), ("In troubleshooting", 1)):
        assert f"{label} {count} " in text, label
    assert "Waiting or running 2 " in text
    assert "1 command waits for an operator" in text
    assert "Batch sealed" in text
    assert "Batch started" in text
    assert "Nothing is sent" in text
    assert "a second" in text  # the rate
    assert "Estimated end" in text


def test_each_number_leads_to_its_commands(admin_client: Client) -> None:
    batch_id = mixed()
    make(1)
    ids = {str(one) for one in Command.objects.filter(batch_id=batch_id).values_list("command_id", flat=True)}
    html = get(admin_client, batch_page(batch_id))
    for status, count in (
        ("COMPLETED", 3),
        ("FAILED", 1),
        ("CANCELED", 1),
        ("IN_TROUBLESHOOTING_QUEUE", 1),
        ("PENDING", 1),
        ("IN_PROGRESS", 1),
    ):
        [link] = set(re.findall(rf'href="(/admin/commandbus/command/\?[^"]*status={status})"', html))
        shown = listed(get(admin_client, unescape(link)))
        assert len(shown) == count, status
        assert set(shown) <= ids


def test_a_batch_that_has_ended_says_how_long_it_took(admin_client: Client) -> None:
    batch_id = make(2)
    finish(receive())
    done = folded(batch_id)
    Batch.objects.update(started_at=timezone.now() - timedelta(seconds=100), completed_at=timezone.now())
    assert done.is_complete
    text = text_of(get(admin_client, batch_page(batch_id)))
    assert "Took 1 min 40 s" in text or "Took 1 min 39 s" in text
    assert "0.02 a second" in text
    assert "Estimated end" not in text
    assert "Batch completed" in text
    assert "took 1 min" in text_of(get(admin_client, LIST))


def test_the_pace_is_that_since_the_start() -> None:
    batch_id, now = make(10), timezone.now()
    assert pace(batch(batch_id), now).rate is None
    received = receive(5)
    Batch.objects.update(status="IN_PROGRESS", started_at=now - timedelta(seconds=20))
    assert pace(batch(batch_id), now).rate is None  # nothing has ended
    finish(received[:4])
    fail(received[4:])
    found = pace(batch(batch_id), now)
    assert found.rate == pytest.approx(0.2)
    assert found.ends_at == now + timedelta(seconds=25)  # 5 wait; one waits for an operator, for nobody knows how long
    assert found.lasted == timedelta(seconds=20)
    assert found.silence is None
    assert pace(batch(batch_id), now + timedelta(minutes=5)).silence is not None
    finish(receive(5))
    assert pace(batch(batch_id), now).ends_at is None


def test_a_batch_in_which_nothing_happens_says_so(admin_client: Client) -> None:
    batch_id = make(2)
    finish(receive(1))
    fold_batches("default")
    Batch.objects.update(updated_at=timezone.now() - timedelta(minutes=7))
    assert re.search(r"Nothing was counted for 7 min", text_of(get(admin_client, batch_page(batch_id))))


def test_open_sealed_and_canceled_batches_say_so(admin_client: Client) -> None:
    batch_id = open_batch("orders", 5, name="In parts")
    text = text_of(get(admin_client, batch_page(batch_id)))
    assert "Open: commands can still be added" in text
    assert "Expected 5 commands" in text
    assert "No commands yet" in text
    assert "Open" in text_of(get(admin_client, LIST))
    seal_batch("orders", batch_id, allow_incomplete=True, operator="olga")
    text = text_of(get(admin_client, batch_page(batch_id)))
    assert "Sealed" in text
    assert "operator olga" in text
    other = make(1)
    receive(1)
    cancel_batch("orders", other, "not <b>needed</b>", operator="kim")
    html = get(admin_client, batch_page(other))
    assert "Canceled by an operator" in text_of(html)
    assert "not &lt;b&gt;needed&lt;/b&gt;" in html
    assert "Canceled" in text_of(get(admin_client, LIST))


def test_the_callback_is_shown_with_what_became_of_it(admin_client: Client) -> None:
    command_id = uuid4()
    batch_id = make(1, on_complete=callback(command_id))
    text = text_of(get(admin_client, batch_page(batch_id)))
    assert "AllDone is sent when the batch completes." in text
    finish(receive())
    fold_batches("default")
    html = get(admin_client, batch_page(batch_id))
    assert page_of(command_id) in html
    assert re.search(r"AllDone was sent [\d-]+ [\d:]+ ?: Pending", text_of(html).replace(" .", "."))
    assert "s3cr3t" not in html
    Command.objects.filter(command_id=command_id).delete()
    html = get(admin_client, batch_page(batch_id))
    assert "It was pruned meanwhile." in text_of(html)
    assert page_of(command_id) not in html


def test_a_callback_that_could_not_be_sent_says_why_and_what_to_do(admin_client: Client) -> None:
    command_id = uuid4()
    batch_id = make(1, on_complete=callback(command_id), name="No end")
    send_command("orders", "SendMail", command_id, {})
    finish(receive())
    fold_batches("default")
    text = text_of(get(admin_client, batch_page(batch_id)))
    assert f"AllDone could not be sent: a command with its id {command_id} was sent before" in text
    assert "manage.py commandbus_batch repair" in text
    assert "repair_batches()" in text
    assert "Callback not sent" in text_of(get(admin_client, LIST))


def test_whatever_somebody_wrote_is_escaped(admin_client: Client) -> None:
    batch_id = make(1, name=NASTY, custom_data={NASTY: NASTY}, on_complete=BatchCommand(NASTY, uuid4(), {}))
    finish(receive())
    fold_batches("default")
    Batch.objects.update(callback_error=NASTY)
    send()
    pages = (LIST, batch_page(batch_id), f"{COMMANDS}?batch={batch_id}", AUDIT, f"{AUDIT}?q={batch_id}")
    command = Command.objects.filter(batch_id=batch_id)[0]
    for page in (*pages, page_of(command.command_id)):
        html = get(admin_client, page)
        assert NASTY not in html, page
    assert "&lt;script&gt;" in get(admin_client, LIST)


def test_there_is_no_page_of_what_is_not_there(admin_client: Client) -> None:
    batch_id = make(1)
    for missing in (f"orders/{uuid4()}", f"other/{batch_id}", f"nowhere/{batch_id}", "orders/x", "x"):
        assert admin_client.get(url("batch_change", missing)).status_code == 404, missing
    assert admin_client.get(url("batch_history", f"orders/{batch_id}")).status_code == 200


def test_nothing_can_be_added_changed_or_deleted(admin_client: Client) -> None:
    batch_id = make(1)
    assert admin_client.get(url("batch_add")).status_code == 403
    assert admin_client.post(batch_page(batch_id), {"status": "COMPLETED"}).status_code == 403
    assert admin_client.post(url("batch_delete", f"orders/{batch_id}"), {"post": "yes"}).status_code in (302, 403)
    assert batch(batch_id).status == "PENDING"


def test_a_viewer_may_look_and_a_stranger_may_not() -> None:
    batch_id = make(1)
    viewer, stranger = client_of(VIEWERS, "victor"), client_of(None, "sam")
    for page in (LIST, batch_page(batch_id)):
        assert viewer.get(page).status_code == 200
        assert stranger.get(page).status_code == 403


def test_commands_are_listed_by_batch_until_one_wants_all(admin_client: Client) -> None:
    batch_id = mixed(name="Invoices of May")
    other = send()
    html = get(admin_client, COMMANDS, {"batch": str(batch_id), "status": "COMPLETED"})
    assert len(listed(html)) == 3
    assert "Of the batch Invoices of May." in text_of(html).replace(" .", ".")
    assert batch_page(batch_id) in html
    assert '<a href="?status=COMPLETED">' in html
    assert len(listed(get(admin_client, COMMANDS, {"batch": str(batch_id)}))) == 8
    assert str(other) not in get(admin_client, COMMANDS, {"q": str(batch_id)})
    gone = get(admin_client, COMMANDS, {"batch": str(uuid4())})
    assert listed(gone) == []
    for wrong in ("x", ""):
        assert admin_client.get(COMMANDS, {"batch": wrong})["Location"] == f"{COMMANDS}?e=1"


def test_a_command_leads_to_its_batch(admin_client: Client) -> None:
    batch_id = make(2, name="Invoices of May")
    html = get(admin_client, page_of(Command.objects.all()[0].command_id))
    assert batch_page(batch_id) in html
    assert "Invoices of May" in text_of(html)
    assert "commands of this batch" in text_of(html)
    assert "batch" not in get(admin_client, page_of(send())).split("Related commands")[1].split("Timeline")[0]


def test_the_audit_shows_batches_and_finds_them(admin_client: Client) -> None:
    batch_id, other = make(1), make(1)
    cancel_batch("orders", batch_id, "no", operator="olga")
    html = get(admin_client, AUDIT, {"q": str(batch_id)})
    assert batch_page(batch_id) in html
    assert batch_page(other) not in html
    text = text_of(html)
    assert "Batch sealed" in text
    assert "Batch canceled" in text
    assert "operator olga" in text
    html = get(admin_client, AUDIT)
    assert batch_page(other) in html
    assert Audit.objects.filter(command_id=None, batch_id=other).exists()


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"o": "2"},
        {"beyond": "1000000000000000"},
        {"domain": "orders"},
        {"domain": "sales"},
        {"status": "PENDING"},
        {"status": "IN_PROGRESS"},
        {"status": "COMPLETED", "domain": "other"},
        {"q": "Batch"},
        {"q": "Rare"},
        {"q": "0000"},
        {"q": str(UUID(int=7))},
        {"created_at__range__lte_0": "2020-01-01"},
    ],
    ids=str,
)
def test_the_list_reads_few_of_many_batches(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch, query: dict[str, str]
) -> None:
    monkeypatch.setattr(search, "AT_MOST", 100)
    monkeypatch.setattr(search, "LOOK_THROUGH", 500)
    fill_batches(20_000)
    before = rows_read("command_bus_batch")
    get(admin_client, LIST, query)
    assert rows_read("command_bus_batch") - before < 2000


def test_few_are_visible_beside_very_many() -> None:
    batch_id = make(1)
    Batch.objects.update(total_count=200_000, completed_count=199_996, failed_count=3)
    BatchDelta.objects.all().delete()
    html = bar(batch(batch_id))
    widths = [float(width) for width in re.findall(r'width="([\d.]+)"', html)]
    assert min(widths) >= 6
    assert sum(widths) <= 1000.1
    assert "199,996 completed" in html
