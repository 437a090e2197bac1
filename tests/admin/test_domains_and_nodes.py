from __future__ import annotations

from uuid import uuid4

import pytest
from django.db import connections
from django.test import Client

from commandbus import nodes
from commandbus.models import Audit, Domain, Node
from commandbus.permissions import OPERATORS, VIEWERS
from tests.admin.pages import BUS, client_of, get, page_of, post, text_of, troubled, url
from tests.helpers import BOTH, send, unreachable

pytestmark = pytest.mark.django_db(databases=BOTH)


@pytest.fixture
def operator() -> Client:
    return client_of(OPERATORS, "olga")


def test_domains_show_what_they_have_to_do(operator: Client) -> None:
    send()
    troubled()
    text = text_of(get(operator, url("domain_changelist")))
    assert "orders default Receiving" in text
    assert "archive second" in text
    assert "reply_queue" in get(operator, url("domain_change", "orders")).replace("Reply queue", "reply_queue")
    for name in ("nowhere", "a%00b"):
        assert operator.get(f"/admin/commandbus/domain/{name}/change/").status_code == 302


def test_a_domain_is_paused_and_resumed_and_the_audit_says_by_whom(operator: Client) -> None:
    question = get(operator, url("domain_pause", "orders", "pause"))
    assert "Pause orders?" in question
    assert not Domain.objects.get(name="orders").paused
    text = text_of(post(operator, url("domain_pause", "orders", "pause"), {"reason": "bank is down"}))
    assert "The domain orders was paused." in text
    assert Domain.objects.get(name="orders").paused
    assert "was paused already" in text_of(post(operator, url("domain_pause", "orders", "pause"), {"reason": ""}))
    post(operator, url("domain_pause", "orders", "resume"), {"reason": ""})
    assert not Domain.objects.get(name="orders").paused
    events = Audit.objects.filter(event_type__startswith="DOMAIN_").order_by("audit_id")
    assert [(event.event_type, event.details_json) for event in events] == [
        ("DOMAIN_PAUSED", {"operator": "olga", "reason": "bank is down"}),
        ("DOMAIN_RESUMED", {"operator": "olga", "reason": None}),
    ]
    for ask in (operator.get, operator.post):
        assert ask(url("domain_pause", "nowhere", "pause"), {"reason": ""}).status_code == 404
    assert "x" * 1001 in post(operator, url("domain_pause", "orders", "pause"), {"reason": "x" * 1001})
    assert not Domain.objects.get(name="orders").paused


def test_nodes_show_what_runs_and_since_when(operator: Client) -> None:
    node_id = uuid4()
    nodes.register(
        "default", node_id=node_id, name="here", role="worker", domains=["orders"], handled_types={"orders": ["X"]}
    )
    command_id = send()
    BUS.receive("orders", qty=1, vt=30, node_id=node_id)
    assert "here" in get(operator, url("node_changelist"))
    html = get(operator, url("node_change", node_id))
    assert page_of(command_id) in html
    assert "Handles of orders" in html
    other = uuid4()
    nodes.register("default", node_id=other, name="there", role="worker", domains=["orders"], handled_types={})
    assert page_of(command_id) not in get(operator, url("node_change", other))
    assert operator.get(url("node_change", uuid4())).status_code == 404
    assert operator.get(url("node_change", "x")).status_code == 404


def test_a_node_is_asked_to_stop_once(operator: Client) -> None:
    node_id = uuid4()
    nodes.register("default", node_id=node_id, name="here", role="worker", domains=["orders"], handled_types={})
    stop = url("node_stop", node_id)
    assert "Stop node here?" in get(operator, stop)
    assert Node.objects.get().stop_requested_at is None
    text = text_of(post(operator, stop, {"reason": "too old"}))
    assert "was asked to stop" in text
    assert "Stopping" in text
    assert Node.objects.get().stop_requested_at is not None
    assert "was asked before, or has stopped" in text_of(post(operator, stop, {"reason": ""}))
    assert "It was asked" in get(operator, url("node_change", node_id))
    [event] = Audit.objects.filter(event_type="NODE_STOP_REQUESTED")
    assert event.details_json == {"operator": "olga", "reason": "too old", "node": "here", "node_id": str(node_id)}
    assert nodes.heartbeat("default", node_id)
    isolated = uuid4()
    nodes.register("default", node_id=isolated, name="i", role="isolated", domains=["orders"], handled_types={})
    assert operator.post(url("node_stop", isolated), {"reason": ""}).status_code == 404
    assert "Ask to stop" not in get(operator, url("node_change", isolated))
    nodes.stopped("default", node_id)
    assert "Ask to stop" not in get(operator, url("node_change", node_id))


def test_a_viewer_may_look_and_a_stranger_may_not() -> None:
    node_id = uuid4()
    nodes.register("default", node_id=node_id, name="here", role="worker", domains=["orders"], handled_types={})
    viewer, stranger = client_of(VIEWERS, "victor"), client_of(None, "sam")
    for page in (
        url("domain_changelist"),
        url("node_changelist"),
        url("node_change", node_id),
        url("troubledcommand_changelist"),
    ):
        assert viewer.get(page).status_code == 200
        assert stranger.get(page).status_code == 403
    for page in (url("domain_pause", "orders", "pause"), url("node_stop", node_id)):
        assert viewer.get(page).status_code == 403
        assert viewer.post(page, {"reason": ""}).status_code == 403
    assert not Domain.objects.get(name="orders").paused
    assert Node.objects.get().stop_requested_at is None
    assert viewer.post(url("node_change", node_id)).status_code == 403


@pytest.mark.django_db(transaction=True, databases=BOTH)
def test_a_database_that_is_away_hides_no_other(operator: Client) -> None:
    troubled()
    with unreachable("second"):
        for page in ("domain_changelist", "node_changelist", "troubledcommand_changelist"):
            html = get(operator, url(page))
            assert "gave no answer" in html
            connections["second"].close()
        assert "it cannot work" in get(operator, url("troubledcommand_changelist"))
        for page in ("command_changelist", "audit_changelist", "unreadablemessage_changelist"):
            response = operator.get(url(page), {"database": "second"}, follow=True)
            assert response.redirect_chain[0][0] == "/admin/"
            assert "The database second gave no answer" in response.content.decode()
            connections["second"].close()
