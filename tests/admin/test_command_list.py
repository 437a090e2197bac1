from __future__ import annotations

import re
from uuid import uuid4

import pytest
from django.contrib.admin import AdminSite
from django.contrib.admin import site as default_site
from django.test import Client, override_settings
from django.urls import include, path

from commandbus import nodes, search, send_command
from commandbus.admin import CommandAdmin, TroubledCommandAdmin
from commandbus.models import Audit, Batch, Command, Domain, Node, TroubledCommand, UnreadableMessage
from tests.admin.pages import BUS, get, page_of, text_of, troubled, url
from tests.batches.helpers import make
from tests.helpers import BOTH, keep, send

pytestmark = pytest.mark.django_db(databases=BOTH)

LIST = "/admin/commandbus/command/"


def listed(html: str) -> list[str]:
    return re.findall(r'<code class="cb-code">([0-9a-f-]{36})</code>', html)


def test_every_filter_narrows_the_list(admin_client: Client) -> None:
    node_id = uuid4()
    nodes.register("default", node_id=node_id, name="here", role="worker", domains=["orders"], handled_types={})
    failed = str(troubled(code="NEVER", kind="Broken"))
    Command.objects.filter(command_id=failed).update(attempts=5, node_id=node_id)
    other = str(send_command("other", "SendMail", uuid4(), {}))
    for query in (
        {"status": "IN_TROUBLESHOOTING_QUEUE"},
        {"domain": "orders"},
        {"type": "PlaceOrder"},
        {"error_type": "Broken"},
        {"error_code": "NEVER"},
        {"attempts": "3"},
        {"node": "here"},
        {"q": failed},
        {"q": "never"},
    ):
        assert listed(get(admin_client, LIST, query)) == [failed], query
    assert listed(get(admin_client, LIST)) == [other, failed]
    assert listed(get(admin_client, LIST, {"o": "3"})) == [failed, other]
    for query in ({"node": "nobody"}, {"error_code": "X"}, {"error_type": "X"}, {"type": "X"}, {"attempts": "9"}):
        assert listed(get(admin_client, LIST, query)) == [], query


@pytest.mark.parametrize(
    "query",
    [
        {"domain": "a\0b"},
        {"type": "\0"},
        {"status": "BOGUS"},
        {"attempts": "x"},
        {"beyond": "x"},
        {"last_error_msg": "x"},
        {"created_at__gte": "x" * 10},
    ],
)
def test_what_cannot_be_meant_leads_to_the_whole_list(admin_client: Client, query: dict[str, str]) -> None:
    """As Django's own lists do."""
    response = admin_client.get(LIST, query)
    assert response.status_code == 302
    assert response["Location"] == f"{LIST}?e=1"


def test_dates_are_chosen_with_range_fields(admin_client: Client) -> None:
    command_id = str(send())
    Command.objects.update(created_at="2026-03-05 23:59:58Z")
    day = {"created_at__range__gte_0": "2026-03-05", "created_at__range__lte_0": "2026-03-05"}
    assert listed(get(admin_client, LIST, day)) == [command_id]  # without times, it is the whole day
    assert listed(get(admin_client, LIST, {**day, "created_at__range__lte_1": "23:00:00"})) == []
    assert listed(get(admin_client, LIST, {"updated_at__range__lte_0": "2026-03-05"})) == []
    html = get(admin_client, LIST, {"created_at__range__gte_0": "nonsense"})
    assert listed(html) == [command_id]
    assert "Enter a valid date." in html


def test_without_rangefilter_dates_are_chosen_as_django_does(admin_client: Client, settings: object) -> None:
    command_id = str(send())
    without = [app for app in settings.INSTALLED_APPS if app != "rangefilter"]  # type: ignore[attr-defined]
    with override_settings(INSTALLED_APPS=without):
        html = get(admin_client, LIST)
        assert "Past 7 days" in html
        assert "range__gte" not in html
        assert listed(html) == [command_id]
        [link] = re.findall(r'href="(\?created_at__gte=[^"]+)">Today', html)
        assert listed(get(admin_client, LIST + link.replace("&amp;", "&"))) == [command_id]
        Command.objects.update(created_at="2020-01-01 00:00:00Z")
        assert listed(get(admin_client, LIST + link.replace("&amp;", "&"))) == []
        assert listed(get(admin_client, LIST, {"created_at__lt": "2021-01-01 00:00:00"})) == [command_id]
        assert admin_client.get(LIST, {"created_at__gte": "soon"}).status_code == 302


def test_a_long_list_says_so_and_leads_on(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "AT_MOST", 3)
    ids = [str(send()) for _ in range(5)]
    html = get(admin_client, LIST)
    assert listed(html) == ids[:1:-1]
    assert re.search(r"These are the newest: 3 of about [\d,]+\. There are more\.", text_of(html))
    [onward, _] = re.findall(r'<a href="(\?beyond=\d+)">look at', html)
    html = get(admin_client, LIST + onward)
    assert listed(html) == ids[1::-1]
    assert "There is nothing older" in text_of(html)
    assert "Back to the newest" in text_of(html)


def test_a_choice_begins_at_the_newest_again(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "AT_MOST", 2)
    for _ in range(5):
        send()
    last = Command.objects.latest("id").pk
    html = get(admin_client, LIST, {"beyond": str(last)})
    assert "?status=PENDING" in html
    assert f"beyond={last}" not in "".join(re.findall(r'href="(\?[^"]*status=[^"]*)"', html))


def test_nothing_found_among_what_was_looked_through_says_that_there_is_more(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "LOOK_THROUGH", 2)
    for _ in range(5):
        send()
    text = text_of(get(admin_client, LIST, {"status": "COMPLETED"}))
    assert "Nothing of what was looked through matches, but not all was." in text
    assert "look at older ones" in text


def test_a_domain_on_another_database_is_listed_from_there(admin_client: Client) -> None:
    kept = keep()
    here, there = str(send()), str(kept)
    assert listed(get(admin_client, LIST)) == [here]
    assert listed(get(admin_client, LIST, {"database": "second"})) == [there]
    assert listed(get(admin_client, LIST, {"domain": "archive"})) == [there]
    assert listed(get(admin_client, LIST, {"database": "nowhere"})) == [here]
    html = get(admin_client, page_of(kept, "archive"))
    assert "in database second" in html


def test_nothing_can_be_added_changed_or_deleted(admin_client: Client) -> None:
    command_id = send()
    assert admin_client.get(url("command_add")).status_code == 403
    assert admin_client.post(page_of(command_id), {"status": "COMPLETED"}).status_code == 403
    assert admin_client.post(url("command_delete", f"orders/{command_id}"), {"post": "yes"}).status_code in (302, 403)
    assert Command.objects.get().status == "PENDING"
    for model in ("audit", "domain", "node", "unreadablemessage", "troubledcommand"):
        assert admin_client.get(url(f"{model}_add")).status_code == 403


other_site = AdminSite(name="backoffice")
other_site.register(Command, CommandAdmin)
other_site.register(TroubledCommand, TroubledCommandAdmin)
small_sites = []
for number, model in enumerate((Audit, Domain, Node, TroubledCommand, UnreadableMessage, Command, Batch)):
    small_sites.append(AdminSite(name=f"small{number}"))
    small_sites[-1].register(model, type(default_site.get_model_admin(model)))
urlpatterns = [
    path("backoffice/", other_site.urls),
    *(path(f"{site.name}/", site.urls) for site in small_sites),
    path("", include("example_project.urls")),
]


@pytest.mark.urls("tests.admin.test_command_list")
def test_another_admin_site_leads_to_its_own_pages(admin_client: Client) -> None:
    command_id = troubled()
    pages = ["/backoffice/commandbus/command/", "/backoffice/commandbus/troubledcommand/"]
    pages.append(f"/backoffice/commandbus/command/orders/{command_id}/change/")
    pages.append(f"/backoffice/commandbus/command/act/retry/?command=orders/{command_id}")
    for page in pages:
        html = get(admin_client, page)
        assert "/backoffice/commandbus/command/" in html
        assert "/admin/commandbus/" not in html, page
    fields = {"rows": f"orders/{command_id}/{Command.objects.get().msg_id}", "reason": ""}
    response = admin_client.post("/backoffice/commandbus/command/act/retry/", fields)
    assert response["Location"] == "/backoffice/commandbus/command/"
    assert BUS.receive("orders", qty=1, vt=30)


@pytest.mark.urls("tests.admin.test_command_list")
def test_an_admin_site_may_have_some_of_the_pages(admin_client: Client) -> None:
    node_id = uuid4()
    nodes.register("default", node_id=node_id, name="here", role="worker", domains=["orders"], handled_types={})
    command_id = troubled()
    running = send()
    BUS.receive("orders", qty=1, vt=30, node_id=node_id)
    for site in small_sites:
        [model] = site._registry
        html = get(admin_client, f"/{site.name}/commandbus/{model._meta.model_name}/")
        assert "/admin/commandbus/" not in html
    assert str(command_id) in get(admin_client, "/small0/commandbus/audit/")
    assert str(running) in get(admin_client, f"/small2/commandbus/node/{node_id}/change/")
    assert "NEVER: it cannot work" in get(admin_client, "/small3/commandbus/troubledcommand/")
    batch_id = make(1)
    part = Command.objects.get(batch_id=batch_id).command_id
    pages = [f"/small6/commandbus/batch/orders/{batch_id}/change/", f"/small5/commandbus/command/?batch={batch_id}"]
    pages += [f"/small5/commandbus/command/orders/{part}/change/", f"/small0/commandbus/audit/?q={batch_id}"]
    for page in pages:
        html = get(admin_client, page)
        assert str(batch_id) in html
        assert "/admin/commandbus/" not in html


@pytest.mark.parametrize("rows", [["abc"], ["1", "abc"], ["9" * 30]])
@pytest.mark.parametrize("across", [{"select_across": "0"}, {"select_across": "1"}, {}])
def test_rows_that_cannot_be_are_refused(admin_client: Client, rows: list[str], across: dict[str, str]) -> None:
    troubled()
    response = admin_client.post(LIST, {"action": "retry", "_selected_action": rows, "index": 0, **across})
    assert response["Location"].endswith("?e=1")


def test_what_runs_is_found_also_where_its_status_does_not_say_so(admin_client: Client) -> None:
    Domain.objects.update(mark_in_progress=False)
    running, _ = str(send()), send()
    BUS.receive("orders", qty=1, vt=30)
    assert listed(get(admin_client, LIST, {"status": "IN_PROGRESS"})) == [running]


def test_commands_without_an_error_of_a_kind_are_found(admin_client: Client) -> None:
    bare, other = str(troubled()), str(troubled())
    Command.objects.filter(command_id=bare).update(last_error_code=None, last_error_type=None)
    for query in ({"error_code": ""}, {"error_type": ""}, {"error_code": "", "error_type": ""}):
        html = get(admin_client, LIST, {"status": "IN_TROUBLESHOOTING_QUEUE", **query})
        assert listed(html) == [bare]
        assert "none" in text_of(html)
    assert listed(get(admin_client, LIST, {"error_code": "", "q": "NEVER"})) == []
    assert listed(get(admin_client, LIST, {"error_code": "NEVER"})) == [other]
