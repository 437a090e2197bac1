from __future__ import annotations

import re
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.test import Client
from django.utils import timezone

from commandbus import conf, nodes, send_command
from commandbus.admin.badges import span
from commandbus.admin.timeline import steps
from commandbus.messages import ErrorInfo, Failure, Finish, Status
from commandbus.models import Audit, Command, UnreadableMessage
from commandbus.permissions import OPERATORS, VIEWERS
from commandbus.pgmq import PgmqClient
from commandbus.transitions import PostgresTransitions
from tests.admin.pages import BUS, client_of, get, page_of, text_of, troubled, url
from tests.helpers import BOTH, send

pytestmark = pytest.mark.django_db(databases=BOTH)


def test_the_timeline_tells_how_long_it_waited_and_ran() -> None:
    start = timezone.now()

    def event(seconds: float, name: str, **details: Any) -> Audit:
        return Audit(event_type=name, ts=start + timedelta(seconds=seconds), details_json=details or None)

    node = uuid4()
    error = {"type": "E", "code": "C", "message": "m", "details": {"a": 1}, "traceback": "Traceback\n  x"}
    told = steps(
        [
            event(0, "SENT"),
            event(2, "RECEIVED", attempt=1, node_id=str(node)),
            event(2.5, "RETRY_SCHEDULED", attempt=1, max_attempts=3, error=error, delay=10),
            event(12.5, "RECEIVED", attempt=2),
            event(12.6, "MOVED_TO_TROUBLESHOOTING_QUEUE", reason="EXHAUSTED"),
            event(72.6, "OPERATOR_EDIT", operator="olga", reason="typo", data={"n": 1}, data_before={"n": 0}),
            event(72.6, "OPERATOR_RETRY", operator="olga"),
            event(72.6, "OF_A_LATER_VERSION"),
        ],
        {str(node): "here"},
    )
    gaps = [(one.before.what, span(one.before.lasted)) if one.before else None for one in told]
    assert gaps == [
        None,
        ("waited", "2.0 s"),
        ("ran", "500 ms"),
        ("waited", "10.0 s"),
        ("ran", "100 ms"),
        ("waited for an operator", "1 min 0 s"),
        None,
        None,
    ]
    assert [one.before.length for one in told if one.before] == [5, 2, 27, 2, 160]
    assert told[1].facts == [("attempt", "1"), ("node", "here")]
    assert told[2].facts == [("attempt", "1 of 3"), ("again after", "10.0 s")]
    assert told[2].failure is not None
    assert told[2].failure.traceback is not None
    assert told[2].failure.traceback.text == "Traceback\n  x"
    assert told[5].facts == [("operator", "olga"), ("reason", "typo")]
    assert told[5].details is not None
    assert '"data_before"' in told[5].details.text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 ms"),
        (0.0123, "12 ms"),
        (59.94, "59.9 s"),
        (61, "1 min 1 s"),
        (3 * 3600 + 62, "3 h 1 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert span(timedelta(seconds=seconds)) == text


def test_the_page_has_everything_that_is_known(admin_client: Client) -> None:
    node = uuid4()
    nodes.register("default", node_id=node, name="here", role="worker", domains=["orders"], handled_types={})
    command_id = send(customer="Ada", password="s3cret")
    [received] = BUS.receive("orders", qty=1, vt=30, node_id=node)
    error = ErrorInfo("BankError", "DOWN", "the bank is down", {"api_key": "s3cret"}, "Traceback: bank.py")
    BUS.fail("orders", [Failure(received.lease, error)])
    follower = send_command("other", "Follow", uuid4(), {}, correlation_id=command_id)
    html = get(admin_client, page_of(command_id))
    text = text_of(html)
    for part in ("In troubleshooting", "the bank is down", "DOWN BankError", "Traceback: bank.py", "node here", "Ada"):
        assert part in text, part
    assert "Moved to troubleshooting queue" in text
    assert f"/admin/commandbus/command/other/{follower}/change/" in html
    assert "s3cret" not in html
    assert html.count('<a class="cb-button"') == 4


def test_the_reply_is_shown_and_gone_data_are_explained(admin_client: Client) -> None:
    command_id = send()
    [received] = BUS.receive("orders", qty=1, vt=30)
    BUS.finish("orders", [Finish(received.lease, Status.COMPLETED, {"invoice": 7, "token": "s3cret"})])
    html = get(admin_client, page_of(command_id))
    assert "&quot;invoice&quot;: 7" in html
    assert "s3cret" not in html
    assert "PAYLOAD_ARCHIVE" in html
    assert text_of(html).count("It has ended: its status is COMPLETED.") == 4


def test_what_is_hidden_is_a_setting(admin_client: Client, settings: Any) -> None:
    settings.COMMANDBUS = {**settings.COMMANDBUS, "MASK": ["iban"]}
    command_id = send(iban="DE12", password="open")
    html = get(admin_client, page_of(command_id))
    assert "DE12" not in html
    assert "open" in html
    settings.COMMANDBUS = {**settings.COMMANDBUS, "MASK": "iban"}
    assert "must be a list of names" in conf.problems()[0]
    settings.COMMANDBUS = {**settings.COMMANDBUS, "MASK": [7]}
    assert "7 is not the name of a key" in conf.problems()[0]


def test_what_is_not_allowed_says_why(admin_client: Client) -> None:
    waiting = send()
    text = text_of(get(admin_client, page_of(waiting)))
    assert text.count("This is for commands in the Troubleshooting Queue.") == 3
    BUS.receive("orders", qty=1, vt=30)
    assert text_of(get(admin_client, page_of(waiting))).count("A worker runs it.") == 4
    viewer = client_of(VIEWERS)
    assert "You need the permission “retry_command” for this." in get(viewer, page_of(waiting))

    failed = troubled()
    with_data = get(admin_client, page_of(failed))
    assert with_data.count('<a class="cb-button"') == 4
    Command.objects.filter(command_id=failed).update(msg_id=99)
    assert "Its data are no longer in the archive." in get(admin_client, page_of(failed))


def test_a_reply_cannot_be_edited(admin_client: Client) -> None:
    body = {"command_id": str(uuid4()), "correlation_id": str(uuid4()), "domain": "sales", "type": "X"}
    PgmqClient().send("sales__replies", {**body, "outcome": "SUCCESS"})
    [received] = BUS.receive("sales__replies", qty=1, vt=30)
    BUS.fail("sales__replies", [Failure(received.lease, ErrorInfo("E", "C", "m"))])
    command = Command.objects.get(domain="sales__replies")
    html = get(admin_client, page_of(command.command_id, "sales__replies"))
    assert "It is a reply, which nobody may change." in html


def test_a_timeline_of_very_many_steps_is_cut_in_the_middle(admin_client: Client) -> None:
    command_id = send()
    Audit.objects.bulk_create(
        Audit(domain="orders", command_id=command_id, event_type="RELEASED", ts=timezone.now() + timedelta(seconds=n))
        for n in range(300)
    )
    text = text_of(get(admin_client, page_of(command_id)))
    assert "101 steps left out" in text
    assert text.count("Released") == 199
    assert "Sent" in text


def test_a_command_that_is_not_there_is_not_found(admin_client: Client) -> None:
    for page in (
        page_of(uuid4()),
        page_of(uuid4(), "nowhere"),
        url("command_change", "7"),
        url("command_change", "orders/x"),
    ):
        assert admin_client.get(page).status_code == 404
    command_id = send()
    assert admin_client.get(url("command_history", f"orders/{command_id}")).status_code == 200
    assert client_of(None).get(page_of(command_id)).status_code == 403
    assert client_of(OPERATORS, "olga").get(page_of(command_id)).status_code == 200


def test_many_related_commands_lead_to_their_list(admin_client: Client) -> None:
    correlation = uuid4()
    ids = [send_command("orders", "PlaceOrder", uuid4(), {}, correlation_id=correlation) for _ in range(25)]
    html = get(admin_client, page_of(ids[0]))
    related = re.findall(r"/admin/commandbus/command/orders/([0-9a-f-]{36})/change/", html)
    assert len(set(related) - {str(ids[0])}) == 20
    assert f"?q={correlation}&amp;database=default" in html


def test_unreadable_messages_are_listed_with_their_body(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        PgmqClient().send("orders__commands", {"what": number, "password": "s3cret"})
    BUS.receive("orders", qty=10, vt=30)
    first = UnreadableMessage.objects.earliest("id")
    html = get(admin_client, url("unreadablemessage_changelist"))
    assert html.count("orders__commands") == 3
    there = PostgresTransitions("second")
    PgmqClient("second").send("archive__commands", {"what": "elsewhere"})
    there.receive("archive", qty=1, vt=30)
    [link] = re.findall(
        r'<a href="([^"]+)">',
        re.findall(r"field-seen.*", get(admin_client, url("unreadablemessage_changelist"), {"database": "second"}))[0],
    )
    assert "elsewhere" in get(admin_client, link.replace("&amp;", "&"))
    html = get(admin_client, url("unreadablemessage_change", first.pk))
    assert "&quot;what&quot;: 0" in html
    assert "s3cret" not in html
    monkeypatch.setattr("commandbus.admin.unreadable.AT_MOST", 2)
    html = get(admin_client, url("unreadablemessage_changelist"))
    assert html.count("orders__commands") == 2
    [onward, _] = re.findall(r'<a href="(\?beyond=\d+)">look at older', html)
    assert get(admin_client, url("unreadablemessage_changelist") + onward).count("orders__commands") == 1
    oldest = get(admin_client, url("unreadablemessage_changelist"), {"o": "0", "beyond": str(first.pk)})
    assert oldest.count("orders__commands") == 2


def test_the_audit_hides_secrets_and_leads_to_commands(admin_client: Client) -> None:
    command_id = troubled(password="s3cret")
    BUS.operator_edit("orders", {command_id: {"password": "n3w"}}, "olga", "typo")
    html = get(admin_client, url("audit_changelist"))
    assert "s3cret" not in html
    assert "n3w" not in html
    assert page_of(command_id) in html
    assert "olga" in html
    found = get(admin_client, url("audit_changelist"), {"event": "OPERATOR_EDIT", "q": "olga", "domain": "orders"})
    assert "1 audit event" in text_of(found)
    assert admin_client.get(url("audit_change", Audit.objects.all()[0].pk)).status_code == 404
