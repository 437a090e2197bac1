"""Pages that must bear everything: any content, any width, light and dark."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest
from playwright.sync_api import Page, expect

from commandbus import BatchCommand, create_batch, send_command
from commandbus.messages import ErrorInfo, Failure
from commandbus.models import Audit, Batch, Command
from commandbus.pgmq import PgmqClient
from commandbus.transitions import PostgresTransitions
from tests.browser.conftest import shot
from tests.helpers import BOTH, running_worker, send, wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=BOTH)

RTL = "שלום עולם \u202e dlrow"
NASTY = "<script>alert('x')</script>"
PAGES = {
    "index": "/admin/",
    "commands": "/admin/commandbus/command/",
    "troubleshooting": "/admin/commandbus/troubledcommand/",
    "domains": "/admin/commandbus/domain/",
    "domain": "/admin/commandbus/domain/orders/change/",
    "nodes": "/admin/commandbus/node/",
    "batches": "/admin/commandbus/batch/",
    "audit": "/admin/commandbus/audit/",
    "unreadable": "/admin/commandbus/unreadablemessage/",
}


def break_everything() -> UUID:
    """A command whose every text is as bad as it can be."""
    data = {"html": NASTY, NASTY: RTL, "long": "x" * 5_000, "list": [{"n": n, "text": "y" * 60} for n in range(1_200)]}
    command_id = send_command("orders", NASTY + "T" * 200, uuid4(), data)
    transitions = PostgresTransitions("default")
    [received] = transitions.receive("orders", qty=1, vt=30)
    error = ErrorInfo(NASTY, f"{RTL}{'C' * 300}", f"{NASTY} {RTL}\n" * 3, details={"sql": NASTY})
    transitions.fail("orders", [Failure(received.lease, error)])
    moved = Audit.objects.get(event_type="MOVED_TO_TROUBLESHOOTING_QUEUE")
    assert moved.details_json is not None
    moved.details_json["error"]["traceback"] = "".join(
        f"line {number} of a very long story\n" for number in range(10_000)
    )
    Audit.objects.filter(audit_id=moved.audit_id).update(details_json=moved.details_json)  # no worker stores so much
    return command_id


def break_a_batch() -> UUID:
    """A batch whose every text is as bad as it can be."""
    name, custom_data = f"{NASTY}{RTL}{'N' * 150}", {NASTY: RTL, "long": "x" * 5_000}
    batch_id = create_batch("orders", [BatchCommand("PlaceOrder", uuid4(), {})], name=name, custom_data=custom_data)
    error, on_complete = f"{NASTY} {RTL} {'E' * 500}", {"command_type": NASTY + "T" * 200, "command_id": str(uuid4())}
    counts = {"total_count": 2_000_000_000, "completed_count": 1_999_999_000, "failed_count": 900, "canceled_count": 9}
    Batch.objects.filter(batch_id=batch_id).update(callback_error=error, on_complete=on_complete, **counts)
    return batch_id


def fits(page: Page) -> bool:
    """Nothing makes the page wider than the window: what is wide scrolls in its own box."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


HIDDEN = """
    [...document.querySelectorAll('.results')].flatMap(list => [...list.querySelectorAll('tbody tr > *')].map(cell => {
        const content = document.createRange();
        content.selectNodeContents(cell);
        return content.getBoundingClientRect().right - list.getBoundingClientRect().right;
    }))
"""


def hides_a_column(page: Page) -> bool:
    """Whether a list has to be scrolled sideways to be read."""
    return any(pixels > 1 for pixels in page.evaluate(HIDDEN))


def test_no_content_breaks_a_page(operator: Page) -> None:
    command_id = break_everything()
    batch_id = break_a_batch()
    for name in ("commands", "troubleshooting", "batches", "audit"):
        operator.goto(PAGES[name])
        shot(operator, f"nasty-{name}")
        assert fits(operator), name
    pages = {
        "batch": f"/admin/commandbus/batch/orders/{batch_id}/change/",
        "cancel-batch": f"/admin/commandbus/batch/orders/{batch_id}/act/cancel/",
        "commands-of-batch": f"/admin/commandbus/command/?batch={batch_id}",
    }
    for name, url in pages.items():
        operator.goto(url)
        shot(operator, f"nasty-{name}")
        assert fits(operator), name
    operator.goto(f"/admin/commandbus/command/orders/{command_id}/change/")
    operator.locator("summary", has_text="Traceback").click()
    expect(operator.locator(".cb-timeline")).to_contain_text("characters left out")
    expect(operator.locator("section[aria-label=Data]")).to_contain_text(NASTY)
    assert fits(operator)
    shot(operator, "nasty-command")
    operator.click("text=Edit data and retry")
    assert fits(operator)
    shot(operator, "nasty-edit")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 768, 1280, 1600])
def test_every_page_in_every_width_and_theme(operator: Page, theme: str, width: int) -> None:
    correlation = uuid4()
    for number in range(3):
        send_command("orders", "PlaceOrder", uuid4(), {"n": number, "permanent": True}, correlation_id=correlation)
    failed = send("SendMail", permanent=True)
    parts = [BatchCommand("PlaceOrder", uuid4(), {"permanent": number < 2}) for number in range(8)]
    batch_id = create_batch("orders", parts, name="Orders of May", custom_data={"month": "May"})
    PgmqClient().send("orders__commands", {"what": "is this", "password": "s3cret"})
    with running_worker():
        wait_until(lambda: not Command.objects.filter(status__in=["PENDING", "IN_PROGRESS"]).exists())
    operator.set_viewport_size({"width": width, "height": 900})
    operator.emulate_media(color_scheme="dark" if theme == "dark" else "light")
    chained = Command.objects.filter(correlation_id=correlation).first()
    assert chained is not None
    more = {
        "command": f"/admin/commandbus/command/orders/{chained.command_id}/change/",
        "batch": f"/admin/commandbus/batch/orders/{batch_id}/change/",
        "cancel-batch": f"/admin/commandbus/batch/orders/{batch_id}/act/cancel/",
        "commands-of-batch": f"/admin/commandbus/command/?batch={batch_id}",
        "confirm": f"/admin/commandbus/command/act/cancel/?command=orders/{failed}",
    }
    for name, url in {**PAGES, **more}.items():
        operator.goto(url)
        shot(operator, f"{name}-{width}-{theme}")
        assert fits(operator), name
        assert width < 768 or "batch" not in name or not hides_a_column(operator), name
    operator.goto(PAGES["unreadable"])
    operator.locator("#result_list tbody a").click()
    expect(operator.locator(".cb-json")).to_contain_text("is this")
    assert "s3cret" not in operator.content()
    shot(operator, f"unreadable-message-{width}-{theme}")
