"""The payments of example_project, which the tutorial builds."""

from __future__ import annotations

from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection
from django.test import Client

from commandbus import get_command
from commandbus.models import Command
from example_project.payments.models import Account, Entry, Payment

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=[False, True], ids=["atomic by itself", "ATOMIC_REQUESTS"], autouse=True)
def _atomic_requests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", request.param)


@pytest.fixture(autouse=True)
def account() -> Account:
    return Account.objects.create(number="DE-1", balance=100)


def post(key: object, **body: Any) -> Any:
    headers = {"Idempotency-Key": str(key)} if key else {}
    return Client().post("/payments/api/", body, content_type="application/json", headers=headers)


def work(commandbus_run: Any) -> None:
    commandbus_run("payments")
    commandbus_run("payments__replies")


def test_a_payment_is_accepted_worked_off_and_shown(commandbus_run: Any) -> None:
    key = uuid4()
    answer = post(key, account="DE-1", amount="10.00")
    assert (answer.status_code, answer.json()) == (202, {"command_id": str(key)})
    page = f"/payments/{key}/"
    before = Client().get(page)
    assert "On its way" in before.text
    assert 'http-equiv="refresh"' in before.text
    work(commandbus_run)
    after = Client().get(page)
    assert "<strong>SUCCESS</strong>" in after.text
    assert 'http-equiv="refresh"' not in after.text
    assert Account.objects.get().balance == 90


def test_a_cent_can_be_paid() -> None:
    assert post(uuid4(), account="DE-1", amount="0.01").status_code == 202


def test_the_same_key_pays_once_and_another_content_under_it_is_refused(commandbus_run: Any) -> None:
    key = uuid4()
    assert [post(key, account="DE-1", amount="10.00").status_code for _ in range(3)] == [202] * 3
    refused = post(key, account="DE-1", amount="11.00")
    assert refused.status_code == 409
    assert str(key) in refused.json()["error"]
    work(commandbus_run)
    assert Entry.objects.count() == 1
    assert Payment.objects.get().amount == Decimal("10.00")


@pytest.mark.parametrize(
    ("key", "body"),
    [
        (None, {"account": "DE-1", "amount": "1.00"}),
        ("not a key", {"account": "DE-1", "amount": "1.00"}),
        (uuid4(), {"account": "DE-1", "amount": "a lot"}),
        (uuid4(), {"account": "DE-1", "amount": "-1.00"}),
        (uuid4(), {"amount": "1.00"}),
    ],
)
def test_a_wrong_request_is_refused_and_nothing_is_written(key: object, body: dict[str, Any]) -> None:
    answer = post(key, **body)
    assert answer.status_code == 400
    assert answer.json()["errors"]
    assert not Payment.objects.exists()
    assert not Command.objects.exists()


@pytest.mark.parametrize("body", ["", "[]", "{"])
def test_a_body_that_is_no_json_object_is_refused(body: str) -> None:
    answer = Client().post("/payments/api/", body, content_type="application/json")
    assert (answer.status_code, answer.json()) == (400, {"error": "the body must be a JSON object"})


def test_if_the_command_cannot_be_sent_there_is_no_payment(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> UUID:
        raise RuntimeError("between the payment and its command")

    monkeypatch.setattr("example_project.payments.views.send_command", fail)
    with pytest.raises(RuntimeError):
        post(uuid4(), account="DE-1", amount="10.00")
    assert not Payment.objects.exists()


def test_a_form_that_is_sent_twice_pays_once(commandbus_run: Any) -> None:
    client = Client()
    form = client.get("/payments/").context["form"]
    data = {"key": str(form.initial["key"]), "account": "DE-1", "amount": "10.00"}
    for _ in range(2):
        answer = client.post("/payments/", data)
        assert (answer.status_code, answer.headers["Location"]) == (302, f"/payments/{data['key']}/")
    other = client.post("/payments/", {**data, "amount": "11.00"})
    assert "sent before, with another content" in other.text
    assert "Enter a number" in client.post("/payments/", {**data, "amount": "x"}).text
    work(commandbus_run)
    assert Entry.objects.count() == 1
    assert data["key"] in client.get("/payments/").text


def test_a_refusal_and_trouble_are_shown_with_the_reason(commandbus_run: Any) -> None:
    refused, troubled = uuid4(), uuid4()
    post(refused, account="DE-1", amount="1000.00")
    post(troubled, account="<b>nobody</b>", amount="1.00")
    Command.objects.update(max_attempts=1)
    work(commandbus_run)
    assert "DE-1 has only 100.00" in Client().get(f"/payments/{refused}/").text
    command = get_command("payments", troubled)
    assert command is not None
    assert command.status == "IN_TROUBLESHOOTING_QUEUE"
    page = Client().get(f"/payments/{troubled}/").text
    assert "Somebody has to look at it" in page
    assert "<b>nobody" not in page
    assert Client().get(f"/payments/{uuid4()}/").status_code == 404
