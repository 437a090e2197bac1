"""Retry, edit, complete and cancel from the pages."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Permission, User
from django.db import OperationalError, connection
from django.test import Client

from commandbus import audit_trail, send_command
from commandbus.admin import acting, targets
from commandbus.messages import ErrorInfo, Failure
from commandbus.models import Audit, Command, Domain
from commandbus.permissions import OPERATORS, VIEWERS
from commandbus.transitions import PostgresTransitions
from tests.admin.pages import BUS, client_of, get, page_of, post, row, text_of, troubled, url
from tests.helpers import BOTH, keep, reload, result, send, status

pytestmark = pytest.mark.django_db(databases=BOTH)

LIST = "/admin/commandbus/command/"
TSQ = "IN_TROUBLESHOOTING_QUEUE"


def act(name: str) -> str:
    return url("command_act", name)


@pytest.fixture
def operator() -> Client:
    return client_of(OPERATORS, "olga")


def test_rows_are_retried_after_a_question_and_the_filter_survives(operator: Client) -> None:
    ids = [troubled() for _ in range(3)]
    here = f"{LIST}?status={TSQ}&domain=orders"
    chosen = [Command.objects.get(command_id=one).pk for one in ids[:2]]
    question = post(operator, here, {"action": "retry", "_selected_action": chosen, "index": 0})
    assert "Retry 2 commands?" in question
    assert {status(one) for one in ids} == {TSQ}
    rows = "\n".join(row(one) for one in ids[:2])
    response = operator.post(act("retry"), {"rows": rows, "reason": "again", "back": here})
    assert response["Location"] == here
    assert "2 commands were sent again." in text_of(get(operator, here))
    assert [status(one) for one in ids] == ["PENDING", "PENDING", TSQ]
    for one in ids[:2]:
        event = audit_trail("orders", one)[-1]
        assert event.details_json is not None
        assert (event.details_json["operator"], event.details_json["reason"]) == ("olga", "again")


def test_one_conflict_does_not_sink_the_rest(operator: Client) -> None:
    first, second = troubled(), troubled()
    rows = f"{row(first)}\n{row(second)}\norders/{uuid4()}/1"
    BUS.operator_retry("orders", [first])
    text = text_of(post(operator, act("complete"), {"rows": rows, "result": "", "reason": ""}))
    assert "1 command was completed." in text
    assert "2 commands were left alone:" in text
    assert "its status is PENDING" in text
    assert "there is no such command" in text
    assert status(second) == "COMPLETED"


def test_what_has_failed_again_since_it_was_chosen_is_left_alone(operator: Client) -> None:
    command_id = troubled()
    chosen = row(command_id)
    BUS.operator_retry("orders", [command_id])
    [received] = BUS.receive("orders", qty=1, vt=30)
    BUS.fail("orders", [Failure(received.lease, ErrorInfo("E", "OTHER", "m"))])
    for name, fields in (("retry", {}), ("cancel", {"reason": "no"}), ("complete", {}), ("edit", {"payload": "{}"})):
        text = text_of(post(operator, act(name), {"rows": chosen, **fields}))
        assert "it was retried since it was chosen, and has failed again" in text, name
    assert status(command_id) == TSQ


def test_cancel_needs_a_reason_and_also_ends_what_waits(operator: Client) -> None:
    waiting, failed = send(), send_command("other", "X", uuid4(), {})
    [received] = BUS.receive("other", qty=1, vt=30)
    BUS.fail("other", [Failure(received.lease, ErrorInfo("E", "C", "m"))])
    rows = f"{row(waiting)}\n{row(failed, 'other')}"
    html = post(operator, act("cancel"), {"rows": rows, "reason": "  "})
    assert "This field is required." in html
    assert status(waiting) == "PENDING"
    text = text_of(post(operator, act("cancel"), {"rows": rows, "reason": "not needed"}))
    assert "2 commands were canceled." in text
    assert status(waiting) == status(failed, "other") == "CANCELED"
    event = audit_trail("orders", waiting)[-1]
    assert event.details_json == {"operator": "olga", "reason": "not needed"}


def test_what_was_retried_since_it_was_chosen_is_not_canceled(operator: Client) -> None:
    command_id = troubled()
    chosen = row(command_id)
    BUS.operator_retry("orders", [command_id])
    text = text_of(post(operator, act("cancel"), {"rows": chosen, "reason": "no"}))
    assert "it was retried since it was chosen" in text
    assert status(command_id) == "PENDING"


def test_rows_that_were_chosen_stay_chosen_when_others_come(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commandbus.search.AT_MOST", 2)
    command_id = troubled()
    for _ in range(3):
        send()
    chosen = [Command.objects.get(command_id=command_id).pk]
    fields = {"action": "retry", "_selected_action": chosen, "index": 0, "select_across": 0}
    assert "Retry 1 command?" in post(operator, LIST, fields)


def test_a_database_error_says_how_far_it_came(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [troubled() for _ in range(3)]
    monkeypatch.setattr("commandbus.ops.troubleshooting.CHUNK", 1)
    retry, calls = PostgresTransitions.operator_retry, []

    def break_down(self: PostgresTransitions, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) > 2:
            raise OperationalError("the server closed the connection")
        return retry(self, *args, **kwargs)

    monkeypatch.setattr(PostgresTransitions, "operator_retry", break_down)
    rows = "\n".join(row(one) for one in ids)
    text = text_of(post(operator, act("retry"), {"rows": rows, "reason": ""}))
    assert "the server closed the connection. Of 3 commands, 2 were dealt with before." in text


def test_what_runs_is_not_canceled(operator: Client) -> None:
    command_id = send()
    BUS.receive("orders", qty=1, vt=30)
    text = text_of(post(operator, act("cancel"), {"rows": row(command_id), "reason": "stop"}))
    assert "1 command was left alone:" in text
    assert status(command_id) == "IN_PROGRESS"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "This is not JSON"),
        ("[1]", "It must be a JSON object"),
        ('{"a": NaN}', "NaN"),
        ("[" * 100_000, "This is not JSON"),
    ],
)
def test_a_wrong_result_is_named_and_nothing_is_done(operator: Client, text: str, problem: str) -> None:
    command_id = troubled()
    html = post(operator, act("complete"), {"rows": row(command_id), "result": text, "reason": ""})
    assert problem in html
    assert status(command_id) == TSQ


def test_complete_with_a_result(operator: Client) -> None:
    command_id = troubled()
    post(operator, act("complete"), {"rows": row(command_id), "result": '{"invoice": 7}', "reason": "by hand"})
    assert result(command_id) == {"invoice": 7}


def test_edited_data_keep_what_was_hidden(operator: Client) -> None:
    command_id = troubled(amount="a lot", card={"token": "tok_1"})
    html = get(operator, act("edit"), {"command": f"orders/{command_id}", "back": page_of(command_id)})
    assert "tok_1" not in html
    assert "••••••" in html
    edited = {"amount": 5, "card": {"token": "••••••"}}
    response = operator.post(
        act("edit"), {"rows": row(command_id), "payload": json.dumps(edited), "back": page_of(command_id)}
    )
    assert response["Location"] == page_of(command_id)
    [received] = BUS.receive("orders", qty=1, vt=30)
    assert received.command.data == {"amount": 5, "card": {"token": "tok_1"}}


def test_an_edit_that_changes_only_a_type_is_an_edit(operator: Client) -> None:
    command_id = troubled(active=1, amount=5.0)
    post(operator, act("edit"), {"rows": row(command_id), "payload": '{"active": true, "amount": 5}'})
    [received] = BUS.receive("orders", qty=1, vt=30)
    assert repr(received.command.data) == "{'active': True, 'amount': 5}"


def test_numbers_that_would_lose_digits_are_not_edited(operator: Client) -> None:
    command_id, number = troubled(a=1), "12345678901234.123456789"
    text = text_of(post(operator, act("edit"), {"rows": row(command_id), "payload": f'{{"a": {number}}}'}))
    assert f"The number {number} has more digits than are kept here" in text
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE pgmq.a_orders__commands SET message = jsonb_set(message, '{data,a}', %s::jsonb)", [number]
        )
    page = {"command": f"orders/{command_id}", "back": page_of(command_id)}
    text = text_of(operator.get(act("edit"), page, follow=True).content.decode())
    assert f"Its data cannot be edited here. The number {number} has more digits" in text
    post(operator, act("retry"), {"rows": row(command_id)})
    with connection.cursor() as cursor:
        cursor.execute("SELECT (message -> 'data')::text FROM pgmq.q_orders__commands")
        assert cursor.fetchall() == [(f'{{"a": {number}}}',)]


def test_edited_data_that_cannot_be_sent_are_refused(operator: Client) -> None:
    command_id = troubled(amount=1)
    for text, problem in (
        ('{"token": "••••••"}', "not sure which value"),
        ("", "required"),
        ("x", "not JSON"),
    ):
        assert problem in post(operator, act("edit"), {"rows": row(command_id), "payload": text})
    large = text_of(
        post(operator, act("edit"), {"rows": row(command_id), "payload": json.dumps({"a": "x" * 1_100_000})})
    )
    assert "take more than the 1048576 bytes" in large
    assert status(command_id) == TSQ
    assert operator.get(act("edit"), {"rows": f"{row(command_id)}\n{row(troubled())}"}).status_code == 404


def test_a_group_is_acted_on_as_it_was_when_somebody_looked(operator: Client) -> None:
    ids = [troubled(code="DOWN") for _ in range(3)]
    other = troubled(code="ELSE")
    group = {"domain": "orders", "type": "PlaceOrder", "error_type": "Broken", "error_code": "DOWN"}
    html = get(operator, act("retry"), group)
    assert "Retry 3 commands?" in html
    [until] = [part.split('"')[0] for part in html.split('name="until" value="')[1:]]
    late = troubled(code="DOWN")
    text = text_of(post(operator, act("retry"), {**group, "until": until, "reason": ""}))
    assert "3 commands were sent again." in text
    assert {status(one) for one in ids} == {"PENDING"}
    assert status(other) == status(late) == TSQ


def test_a_group_without_code_is_not_the_whole_queue(operator: Client) -> None:
    bare, other = troubled(), troubled()
    Command.objects.filter(command_id=bare).update(last_error_code=None, last_error_type=None)
    html = get(operator, url("troubledcommand_changelist"))
    assert "no code" in html
    group = {"domain": "orders", "type": "PlaceOrder", "error_type": "", "error_code": "", "until": ""}
    post(operator, act("cancel"), {**group, "reason": "no"})
    assert (status(bare), status(other)) == ("CANCELED", TSQ)


def test_a_large_group_is_done_in_steps(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "AT_MOST", 2)
    ids = [troubled() for _ in range(3)]
    group = {"domain": "orders", "type": "PlaceOrder", "error_type": "Broken", "error_code": "NEVER"}
    assert "Retry 2 commands or more?" in get(operator, act("retry"), group)
    text = text_of(post(operator, act("retry"), {**group, "until": "", "reason": ""}))
    assert "do it again for the rest" in text
    assert [status(one) for one in ids] == ["PENDING", "PENDING", TSQ]


def test_a_group_that_is_gone_says_so(operator: Client) -> None:
    group = {"domain": "orders", "type": "PlaceOrder", "error_type": "Broken", "error_code": "NEVER"}
    response = operator.get(act("retry"), group, follow=True)
    assert "Nothing like that is in the Troubleshooting Queue any more." in text_of(response.content.decode())


def test_what_left_a_group_since_somebody_was_asked_is_said(operator: Client) -> None:
    ids = [troubled() for _ in range(3)]
    group = {"domain": "orders", "type": "PlaceOrder", "error_type": "Broken", "error_code": "NEVER"}
    html = get(operator, act("retry"), group)
    asked = {name: html.split(f'name="{name}" value="')[1].split('"')[0] for name in ("until", "asked")}
    BUS.operator_retry("orders", ids[:2])
    text = text_of(post(operator, act("retry"), {**group, **asked, "reason": ""}))
    assert "2 commands were resolved or retried by somebody else since you were asked." in text
    assert "1 command was sent again." in text
    text = text_of(post(operator, act("retry"), {**group, **asked, "reason": ""}))
    assert "3 commands were resolved or retried by somebody else" in text


def test_a_group_shows_no_masked_value(operator: Client) -> None:
    command_id = send()
    [received] = BUS.receive("orders", qty=1, vt=30)
    message = json.dumps({"detail": 500 * "x", "token": "s3cr3t"})
    BUS.fail("orders", [Failure(received.lease, ErrorInfo("E", "HTTP_400", message))])
    Command.objects.update(last_error_msg=json.dumps({"token": "s3cr3t", "detail": 500 * "x"}))
    assert "s3cr3t" not in get(operator, url("troubledcommand_changelist"))
    html = get(operator, page_of(command_id))
    assert "s3cr3t" not in html
    assert "••••••" in html


def test_groups_of_domains_that_this_project_does_not_know_are_shown(operator: Client) -> None:
    """Those for replies, and those that another project has registered in the same database."""
    troubled()
    Command.objects.update(domain="sales__replies")
    page = url("troubledcommand_changelist")
    for query in ({}, {"domain": "sales__replies"}):
        assert "1 command waits for an operator." in text_of(get(operator, page, query))
    troubled()
    foreign = Domain.objects.get(name="other")
    foreign.name, foreign.queue_name = "foreign", "foreign__commands"
    foreign.save(force_insert=True)
    Command.objects.filter(domain="orders").update(domain="foreign")
    assert "1 command waits for an operator." in text_of(get(operator, page, {"domain": "foreign"}))
    assert operator.get(page, {"domain": "nowhere"}).status_code == 404


def test_the_number_of_a_group_leads_to_its_commands_only(operator: Client) -> None:
    bare, _ = troubled(), troubled()
    Command.objects.filter(command_id=bare).update(last_error_code=None, last_error_type=None)
    links = re.findall(
        r'<a href="([^"]+)" title="List these commands">1<', get(operator, url("troubledcommand_changelist"))
    )
    assert len(links) == 2
    for link in links:
        assert get(operator, unescape(link)).count('name="_selected_action"') == 1


def test_groups_are_shown_with_counts_samples_and_times(operator: Client) -> None:
    for _ in range(2):
        troubled(code="DOWN", kind="BankError")
    troubled("SendMail", code="<b>", kind="Broken")
    html = get(operator, url("troubledcommand_changelist"))
    text = text_of(html)
    assert "3 commands wait for an operator." in text
    assert "DOWN BankError DOWN: it cannot work" in text
    assert "&lt;b&gt;" in html
    assert "status=IN_TROUBLESHOOTING_QUEUE&amp;domain=orders&amp;type=PlaceOrder" in html
    assert "Nothing waits for an operator in sales." in text_of(
        get(operator, url("troubledcommand_changelist"), {"domain": "sales"})
    )
    assert operator.get(url("troubledcommand_change", "orders/x")).status_code == 302


def test_another_database_is_acted_on_there(operator: Client) -> None:
    command_id = keep()
    bus = PostgresTransitions("second")
    [received] = bus.receive("archive", qty=1, vt=30)
    bus.fail("archive", [Failure(received.lease, ErrorInfo("E", "C", "m"))])
    assert "archive" in get(operator, url("troubledcommand_changelist"))
    post(operator, act("retry"), {"rows": row(command_id, "archive"), "reason": ""})
    assert status(command_id, "archive") == "PENDING"
    assert Audit.objects.using("second").filter(event_type="OPERATOR_RETRY").exists()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"command": "orders/x"}, "must be a UUID"),
        ({"command": f"nowhere/{uuid4()}"}, "is not registered"),
        ({"command": f"orders/{uuid4()}"}, "here is no command"),
        ({"domain": "nowhere"}, "is not registered"),
        ({"rows": f"nowhere/{uuid4()}/1"}, "is not registered"),
        ({"rows": "nonsense"}, "does not name a command"),
        ({"rows": f"orders/{uuid4()}/x"}, "does not name a command"),
        ({"domain": "orders", "type": "\0"}, "NUL"),
        ({"domain": "orders", "until": "yesterday"}, "is not a time"),
        ({"domain": "orders", "until": "2026-99-99 00:00"}, "is not a time"),
    ],
)
def test_what_cannot_be_meant_is_named(operator: Client, fields: dict[str, Any], problem: str) -> None:
    assert problem in text_of(post(operator, act("retry"), {**fields, "reason": ""}))


def test_nobody_is_led_to_another_site(operator: Client) -> None:
    command_id = troubled()
    for back in ("https://evil.example/", "//evil.example", "javascript:alert(1)"):
        html = get(operator, act("retry"), {"command": f"orders/{command_id}", "back": back})
        assert f'href="{back}"' not in html
    response = operator.post(act("retry"), {"rows": row(command_id), "reason": "", "back": "https://evil.example/"})
    assert response["Location"] == LIST


@pytest.mark.parametrize(("name", "permission"), [(one.name, one.permission) for one in acting.ACTIONS.values()])
def test_every_action_needs_its_own_permission(name: str, permission: str) -> None:
    viewer = client_of(VIEWERS, "victor")
    command_id = troubled()
    fields = {"rows": row(command_id), "reason": "x", "payload": "{}", "result": ""}
    assert viewer.get(act(name), {"command": f"orders/{command_id}"}).status_code == 403
    assert viewer.post(act(name), fields).status_code == 403
    assert status(command_id) == TSQ
    victor = User.objects.get(username="victor")
    others = Permission.objects.filter(content_type__app_label="commandbus").exclude(codename=permission)
    victor.user_permissions.set(others)
    assert viewer.post(act(name), fields).status_code == 403
    victor.user_permissions.set(Permission.objects.filter(codename=permission))
    assert viewer.post(act(name), fields).status_code == 302
    assert status(command_id) != TSQ
    victor.groups.clear()
    victor.user_permissions.set(Permission.objects.filter(codename=permission))
    assert viewer.post(act(name), fields).status_code == 403  # who may not look may not act


def test_a_post_without_the_token_of_the_form_is_refused() -> None:
    client_of(OPERATORS, "olga")
    command_id = troubled()
    strict = Client(enforce_csrf_checks=True)
    strict.login(username="olga", password="secret")
    assert strict.post(act("retry"), {"rows": row(command_id), "reason": ""}).status_code == 403
    assert reload(command_id).status == TSQ


def test_an_action_of_the_list_needs_its_permission() -> None:
    viewer = client_of(VIEWERS)
    command_id = troubled()
    chosen = Command.objects.get(command_id=command_id).pk
    html = post(viewer, LIST, {"action": "retry", "_selected_action": [chosen], "index": 0})
    assert "Retry 1 command?" not in html
    assert 'name="action"' not in html


def test_there_are_no_other_actions(operator: Client) -> None:
    assert operator.get(act("destroy")).status_code == 404


@pytest.mark.django_db(transaction=True, databases=BOTH)
def test_what_was_done_stays_done_where_requests_are_atomic(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = client_of(OPERATORS, "olga")
    ids = [troubled() for _ in range(2)]
    rows = "\n".join(row(one) for one in ids)
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    monkeypatch.setattr("commandbus.ops.troubleshooting.CHUNK", 1)
    retry, calls = PostgresTransitions.operator_retry, []

    def break_down(self: PostgresTransitions, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) > 1:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1 / 0")
        return retry(self, *args, **kwargs)

    monkeypatch.setattr(PostgresTransitions, "operator_retry", break_down)
    text = text_of(post(operator, act("retry"), {"rows": rows, "reason": ""}))
    assert "Of 2 commands, 1 were dealt with before." in text
    assert sorted(status(one) for one in ids) == [TSQ, "PENDING"]
