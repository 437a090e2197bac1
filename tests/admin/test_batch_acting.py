"""Cancel, retry and seal a batch from its page."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest
from django.contrib.auth.models import Permission, User
from django.db import OperationalError, connection
from django.test import Client

from commandbus import add_to_batch, cancel_batch, create_batch, open_batch, seal_batch
from commandbus.admin import batch_acting
from commandbus.models import Audit
from commandbus.permissions import OPERATORS, VIEWERS
from commandbus.transitions import PostgresTransitions
from tests.admin.pages import client_of, get, post, text_of, url
from tests.batches.helpers import batch, counts, fail, finish, fold_batches, make, receive, some
from tests.helpers import BOTH

pytestmark = pytest.mark.django_db(databases=BOTH)


def act(batch_id: UUID, name: str, domain: str = "orders") -> str:
    return url("batch_act", domain, batch_id, name)


def batch_page(batch_id: UUID, domain: str = "orders") -> str:
    return url("batch_change", f"{domain}/{batch_id}")


@pytest.fixture
def operator() -> Client:
    return client_of(OPERATORS, "olga")


def troubled(count: int = 1, waiting: int = 0) -> UUID:
    batch_id = make(count + waiting)
    fail(receive(count))
    return batch_id


def test_a_batch_is_canceled_after_a_question(operator: Client) -> None:
    batch_id = troubled(1, waiting=3)
    question = get(operator, act(batch_id, "cancel"))
    assert "Cancel the batch?" in question
    assert "1 in troubleshooting, 3 waiting or running of 4" in text_of(question)
    assert batch(batch_id).canceled_at is None
    html = post(operator, act(batch_id, "cancel"), {"reason": " "})
    assert "This field is required." in html
    assert batch(batch_id).canceled_at is None
    response = operator.post(act(batch_id, "cancel"), {"reason": "not needed"}, follow=True)
    assert response.redirect_chain == [(batch_page(batch_id), 302)]
    text = text_of(response.content.decode())
    assert "The batch was canceled, and 3 commands with it." in text
    assert "1 command is in the Troubleshooting Queue, and the batch does not complete before it is resolved." in text
    assert counts(batch_id) == (4, 0, 0, 3, 1)
    event = Audit.objects.get(event_type="BATCH_CANCELED")
    assert event.details_json == {"operator": "olga", "reason": "not needed"}


def test_those_in_the_troubleshooting_queue_are_canceled_too_if_that_is_wanted(operator: Client) -> None:
    batch_id = troubled(2, waiting=1)
    text = text_of(post(operator, act(batch_id, "cancel"), {"reason": "no", "troubleshooting": "on"}))
    assert "The batch was canceled, and 3 commands with it." in text
    assert counts(batch_id) == (3, 0, 0, 3, 0)


def test_what_runs_goes_on_and_that_is_said(operator: Client) -> None:
    batch_id = make(3)
    receive(1)
    text = text_of(post(operator, act(batch_id, "cancel"), {"reason": "no"}))
    assert "The batch was canceled, and 2 commands with it." in text
    assert "1 command runs, and goes on." in text


def test_cancel_goes_on_where_it_was(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_acting, "AT_MOST", 2)
    batch_id = make(5)
    assert "2 at a time" in text_of(get(operator, act(batch_id, "cancel")))
    text = text_of(post(operator, act(batch_id, "cancel"), {"reason": "no"}))
    assert "The batch was canceled, and 2 commands with it." in text
    assert "3 commands of the batch are left: do it again, or let manage.py commandbus_batch cancel do all." in text
    post(operator, act(batch_id, "cancel"), {"reason": "no"})
    text = text_of(post(operator, act(batch_id, "cancel"), {"reason": "no"}))
    assert "are left" not in text
    assert counts(batch_id) == (5, 0, 0, 5, 0)
    assert Audit.objects.filter(event_type="BATCH_CANCELED").count() == 1


def test_commands_in_the_troubleshooting_queue_are_sent_again(operator: Client) -> None:
    other, batch_id = troubled(1), troubled(2, waiting=1)
    assert "Retry 2 commands of the batch?" in get(operator, act(batch_id, "retry"))
    text = text_of(post(operator, act(batch_id, "retry"), {"reason": "the bank is back"}))
    assert "2 commands were sent again." in text
    assert counts(batch_id) == (3, 0, 0, 0, 0)
    assert counts(other) == (1, 0, 0, 0, 1)
    for event in Audit.objects.filter(event_type="OPERATOR_RETRY"):
        assert event.details_json is not None
        assert (event.details_json["operator"], event.details_json["reason"]) == ("olga", "the bank is back")


def test_retry_of_many_is_done_in_steps(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_acting, "AT_MOST", 2)
    batch_id = troubled(3)
    text = text_of(post(operator, act(batch_id, "retry"), {"reason": ""}))
    assert "2 commands were sent again." in text
    assert "1 command of the batch is left: do it again, or let manage.py commandbus_batch retry do all." in text
    assert counts(batch_id)[4] == 1


def test_an_open_batch_is_sealed(operator: Client) -> None:
    batch_id = open_batch("orders")
    add_to_batch("orders", batch_id, some(2))
    question = get(operator, act(batch_id, "seal"))
    assert "Seal the batch?" in question
    assert "allow_incomplete" not in question
    assert batch(batch_id).is_open
    assert "The batch was sealed." in text_of(post(operator, act(batch_id, "seal"), {}))
    assert not batch(batch_id).is_open
    event = Audit.objects.get(event_type="BATCH_SEALED")
    assert event.details_json == {"operator": "olga", "total_count": 2}


def test_a_batch_with_another_number_than_expected_is_sealed_only_if_that_is_wanted(operator: Client) -> None:
    batch_id = open_batch("orders", 5)
    add_to_batch("orders", batch_id, some(2))
    question = get(operator, act(batch_id, "seal"))
    assert "5 commands were expected, and it has 2." in text_of(question)
    html = post(operator, act(batch_id, "seal"), {})
    assert "This field is required." in html
    assert batch(batch_id).is_open
    assert "The batch was sealed." in text_of(post(operator, act(batch_id, "seal"), {"allow_incomplete": "on"}))
    assert not batch(batch_id).is_open


def test_what_changes_between_the_question_and_the_answer_is_refused_by_the_database(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = open_batch("orders", 0)
    complete = make(1)
    finish(receive(1))
    before = batch(complete)
    fold_batches("default")

    def add_meanwhile(domain: str, one: UUID, **options: Any) -> Any:
        add_to_batch("orders", batch_id, some(1))
        return seal_batch(domain, one, **options)

    monkeypatch.setattr(batch_acting, "seal_batch", add_meanwhile)
    text = text_of(post(operator, act(batch_id, "seal"), {}))
    assert "has 1 commands, but 0 were expected" in text
    assert batch(batch_id).is_open
    monkeypatch.setattr(batch_acting, "get_batch", lambda domain, one: before)
    text = text_of(post(operator, act(complete, "cancel"), {"reason": "no"}))
    assert "cannot be canceled: its status is COMPLETED" in text


def test_a_button_that_is_not_allowed_says_why(operator: Client) -> None:
    opened = open_batch("orders")
    text = text_of(get(operator, batch_page(opened)))
    assert "Retry None of its commands is in the Troubleshooting Queue." in text
    ended = make(1)
    finish(receive(1))
    fold_batches("default")
    text = text_of(get(operator, batch_page(ended)))
    assert "Cancel It has ended: its status is COMPLETED." in text
    assert "Seal It is sealed." in text
    canceled = make(1)
    receive(1)
    cancel_batch("orders", canceled, "no")
    finish([])
    assert "Seal It was canceled, and takes no more commands." in text_of(get(operator, batch_page(canceled)))
    viewer = client_of(VIEWERS, "victor")
    text = text_of(get(viewer, batch_page(opened)))
    for permission in ("cancel_batch", "retry_batch", "seal_batch"):
        assert f"You need the permission “{permission}” for this." in text
    assert "cb-button" in get(viewer, batch_page(opened))
    assert 'a class="cb-button"' not in get(viewer, batch_page(opened))


def test_what_is_not_allowed_is_not_done_by_hand_either(operator: Client) -> None:
    ended = make(1)
    finish(receive(1))
    fold_batches("default")
    for name in ("cancel", "retry", "seal"):
        for ask in (operator.get, operator.post):
            response = ask(act(ended, name), {"reason": "x"}, follow=True)
            assert response.redirect_chain == [(batch_page(ended), 302)], name
            assert 'class="warning"' in response.content.decode()
    assert batch(ended).canceled_at is None


@pytest.mark.parametrize("name", ["cancel", "retry", "seal"])
def test_every_action_needs_its_own_permission(name: str) -> None:
    viewer = client_of(VIEWERS, "victor")
    batch_id = open_batch("orders")
    add_to_batch("orders", batch_id, some(2))
    fail(receive(1))
    before, fields = counts(batch_id), {"reason": "x"}

    def nothing_was_done() -> bool:
        now = batch(batch_id)
        return now.is_open and now.canceled_at is None and counts(batch_id) == before

    assert viewer.get(act(batch_id, name)).status_code == 403
    assert viewer.post(act(batch_id, name), fields).status_code == 403
    victor = User.objects.get(username="victor")
    others = Permission.objects.filter(content_type__app_label="commandbus").exclude(codename=f"{name}_batch")
    victor.user_permissions.set(others)
    assert viewer.post(act(batch_id, name), fields).status_code == 403
    victor.groups.clear()
    victor.user_permissions.set(Permission.objects.filter(codename=f"{name}_batch"))
    assert viewer.post(act(batch_id, name), fields).status_code == 403  # who may not look may not act
    assert nothing_was_done()
    victor.user_permissions.set(Permission.objects.filter(codename__in=[f"{name}_batch", "view_batch"]))
    assert viewer.post(act(batch_id, name), fields).status_code == 302
    assert not nothing_was_done()


def test_a_post_without_the_token_of_the_form_is_refused() -> None:
    client_of(OPERATORS, "olga")
    batch_id = make(1)
    strict = Client(enforce_csrf_checks=True)
    strict.login(username="olga", password="secret")
    assert strict.post(act(batch_id, "cancel"), {"reason": "x"}).status_code == 403
    assert batch(batch_id).canceled_at is None


def test_what_is_not_there_cannot_be_acted_on(operator: Client) -> None:
    batch_id = make(1)
    for page in (
        act(uuid4(), "cancel"),
        act(batch_id, "destroy"),
        act(batch_id, "cancel", "other"),
        act(batch_id, "cancel", "nowhere"),
    ):
        assert operator.get(page).status_code == 404, page
        assert operator.post(page, {"reason": "x"}).status_code == 404, page


def test_a_name_is_escaped_in_the_question(operator: Client) -> None:
    batch_id = make(1, name="<script>")
    html = get(operator, act(batch_id, "cancel"))
    assert "<script>" not in html.split("<h1")[1].split("</form>")[0]
    assert "&lt;script&gt;" in html


def test_a_batch_on_another_database_is_acted_on_there(operator: Client) -> None:
    batch_id = create_batch("archive", some(2, "KeepOrder"))
    text = text_of(post(operator, act(batch_id, "cancel", "archive"), {"reason": "no"}))
    assert "The batch was canceled, and 2 commands with it." in text
    assert Audit.objects.using("second").filter(event_type="BATCH_CANCELED").exists()


@pytest.mark.django_db(transaction=True, databases=BOTH)
def test_what_was_done_stays_done_where_requests_are_atomic(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = client_of(OPERATORS, "olga")
    batch_id = make(2)
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    monkeypatch.setattr("commandbus.ops.troubleshooting.CHUNK", 1)
    cancel, calls = PostgresTransitions.cancel, []

    def break_down(self: PostgresTransitions, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) > 1:
            raise OperationalError("the server closed the connection")
        return cancel(self, *args, **kwargs)

    monkeypatch.setattr(PostgresTransitions, "cancel", break_down)
    text = text_of(post(operator, act(batch_id, "cancel"), {"reason": "no"}))
    assert "The server closed the connection. 1 command was dealt with before." in text
    assert counts(batch_id)[3] == 1
    assert batch(batch_id).canceled_at is not None
