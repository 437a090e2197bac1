"""What an operator does at three in the morning."""

from __future__ import annotations

import re
from uuid import UUID

import pytest
from playwright.sync_api import Page, expect

from commandbus import BatchCommand, audit_trail, create_batch, get_batch, pause_domain, uuid7
from commandbus.models import Audit, Command, Node
from tests.browser.conftest import shot
from tests.helpers import BOTH, barrier, reload, result, running_worker, send, status, wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=BOTH)


def fail(**data: object) -> UUID:
    return send("PlaceOrder", permanent=True, **data)


def work_off() -> None:
    with running_worker():
        wait_until(lambda: not Command.objects.filter(status__in=["PENDING", "IN_PROGRESS"]).exists())


def test_find_a_failed_command_read_why_retry_it_and_see_it_complete(operator: Page) -> None:
    command_id = send("PlaceOrder", fail_attempts=3, customer="Ada")
    send("SendMail")
    work_off()
    operator.click("text=Commands")
    shot(operator, "commands")
    operator.fill("#searchbar", "NOT_YET")
    operator.press("#searchbar", "Enter")
    expect(operator.locator("#result_list tbody tr")).to_have_count(1)
    operator.click(f"text={command_id}")
    expect(operator.locator("h1")).to_contain_text("In troubleshooting")
    expect(operator.locator(".cb-timeline")).to_contain_text("attempt 3 of 3")
    expect(operator.locator(".cb-timeline")).to_contain_text("EXHAUSTED")
    operator.locator(".cb-details summary", has_text="Traceback").last.click()
    expect(operator.locator(".cb-timeline pre", has_text="TransientCommandError").last).to_be_visible()
    shot(operator, "command-in-trouble")

    operator.click("a.cb-button:text-is('Retry')")
    operator.fill("[name=reason]", "the stock is back")
    shot(operator, "confirm-retry")
    operator.click("input[type=submit]")
    expect(operator.locator(".messagelist")).to_contain_text("1 command was sent again.")
    expect(operator.locator("h1")).to_contain_text("Pending")
    expect(operator.locator(".cb-timeline")).to_contain_text("the stock is back")

    Command.objects.update(max_attempts=5)
    work_off_all(command_id)
    operator.reload()
    expect(operator.locator("h1")).to_contain_text("Completed")
    expect(operator.locator("section[aria-label=Reply]")).to_contain_text('"outcome": "SUCCESS"')
    shot(operator, "command-completed")
    [retry] = [event for event in audit_trail("orders", command_id) if event.event_type == "OPERATOR_RETRY"]
    assert retry.details_json is not None
    assert retry.details_json["operator"] == "olga"


def work_off_all(command_id: UUID) -> None:
    with running_worker():
        wait_until(lambda: status(command_id) == "COMPLETED")


def test_act_on_a_group(operator: Page) -> None:
    ids = [fail(number=number) for number in range(3)]
    other = send("SendMail", permanent=True)
    work_off()
    operator.click("text=Troubleshooting")
    shot(operator, "troubleshooting")
    row = operator.locator("#result_list tbody tr", has_text="PlaceOrder")
    expect(row).to_contain_text("it cannot work")
    row.locator("text=Cancel").click()
    expect(operator.locator("h1")).to_have_text("Cancel 3 commands?")
    operator.click("input[type=submit]")
    expect(operator.locator(".errorlist")).to_contain_text("required")
    shot(operator, "confirm-cancel-without-reason")
    assert {status(one) for one in ids} == {"IN_TROUBLESHOOTING_QUEUE"}
    operator.fill("[name=reason]", "the customer has left")
    operator.click("input[type=submit]")
    expect(operator.locator(".messagelist")).to_contain_text("3 commands were canceled.")
    expect(operator.locator("#result_list tbody tr")).to_have_count(1)
    assert {status(one) for one in ids} == {"CANCELED"}
    assert status(other) == "IN_TROUBLESHOOTING_QUEUE"


def test_act_on_rows_and_keep_the_filter(operator: Page) -> None:
    ids = [fail(number=number) for number in range(3)]
    work_off()
    operator.goto("/admin/commandbus/command/?status=IN_TROUBLESHOOTING_QUEUE&domain=orders&error_code=NEVER")
    for one in ids[:2]:
        operator.locator("#result_list tr", has_text=str(one)).locator("input.action-select").check()
    operator.select_option("[name=action]", "complete")
    shot(operator, "rows-chosen")
    operator.click("button[name=index]")
    expect(operator.locator("h1")).to_have_text("Complete 2 commands?")
    operator.click("input[type=submit]")
    expect(operator).to_have_url(re.compile(r"\?status=IN_TROUBLESHOOTING_QUEUE&domain=orders&error_code=NEVER$"))
    expect(operator.locator("#result_list tbody tr")).to_have_count(1)
    assert [status(one) for one in ids] == ["COMPLETED", "COMPLETED", "IN_TROUBLESHOOTING_QUEUE"]


def test_complete_with_a_result(operator: Page) -> None:
    command_id = fail()
    work_off()
    operator.goto(f"/admin/commandbus/command/orders/{command_id}/change/")
    operator.click("a.cb-button:text-is('Complete')")
    operator.fill("[name=result]", '{"invoice": 7,}')
    operator.click("input[type=submit]")
    expect(operator.locator(".errorlist")).to_contain_text("This is not JSON")
    shot(operator, "complete-with-wrong-json")
    operator.fill("[name=result]", '{"invoice": 7}')
    operator.fill("[name=reason]", "written by hand")
    operator.click("input[type=submit]")
    expect(operator.locator("section[aria-label=Reply]")).to_contain_text('"invoice": 7')
    assert result(command_id) == {"invoice": 7}


def test_edit_the_data_and_retry_without_seeing_what_is_hidden(operator: Page) -> None:
    command_id = fail(customer="Ada", card={"token": "tok_123", "name": "Ada"})
    work_off()
    operator.goto(f"/admin/commandbus/command/orders/{command_id}/change/")
    assert "tok_123" not in operator.content()
    operator.click("text=Edit data and retry")
    assert "tok_123" not in operator.content()
    text = operator.input_value("[name=payload]")
    shot(operator, "edit")
    operator.fill("[name=payload]", text.replace('"permanent": true', '"permanent": false'))
    operator.click("input[type=submit]")
    expect(operator.locator(".messagelist")).to_contain_text("sent again with new data")
    assert "tok_123" not in operator.content()
    shot(operator, "edited")
    work_off_all(command_id)
    edit = Audit.objects.get(event_type="OPERATOR_EDIT")
    assert edit.details_json is not None
    assert edit.details_json["data"]["card"]["token"] == "tok_123"


def test_a_viewer_sees_why_not_and_a_forged_post_is_refused(viewer: Page) -> None:
    command_id = fail()
    work_off()
    viewer.goto(f"/admin/commandbus/command/orders/{command_id}/change/")
    expect(viewer.locator("a.cb-button")).to_have_count(0)
    expect(viewer.locator(".cb-actions")).to_contain_text("You need the permission “retry_command” for this.")
    shot(viewer, "viewer")
    viewer.goto("/admin/commandbus/troubledcommand/")
    expect(viewer.locator("a.cb-button")).to_have_count(0)
    shot(viewer, "viewer-troubleshooting")
    token = next(cookie["value"] for cookie in viewer.context.cookies() if cookie["name"] == "csrftoken")
    msg_id = reload(command_id).msg_id
    for action in ("retry", "edit", "cancel", "complete"):
        forged = viewer.request.post(
            f"/admin/commandbus/command/act/{action}/",
            form={"rows": f"orders/{command_id}/{msg_id}", "reason": "ha", "csrfmiddlewaretoken": token},
            headers={"Referer": viewer.url},
        )
        assert forged.status == 403
    assert status(command_id) == "IN_TROUBLESHOOTING_QUEUE"


def test_pause_and_resume_a_domain(operator: Page) -> None:
    send()
    operator.click("text=Domains")
    shot(operator, "domains")
    operator.locator("#result_list tr", has_text="orders").locator("text=Pause").click()
    operator.fill("[name=reason]", "the bank is down")
    shot(operator, "pause")
    operator.click("input[type=submit]")
    expect(operator.locator("#result_list tr", has_text="orders")).to_contain_text("Paused")
    assert not pause_domain("orders")
    operator.locator("#result_list tr", has_text="orders").locator("text=Resume").click()
    operator.click("input[type=submit]")
    expect(operator.locator("#result_list tr", has_text="orders")).to_contain_text("Receiving")


def test_ask_a_node_to_stop(operator: Page) -> None:
    with barrier() as gate, running_worker(name="here", vt=3):
        send("PlaceOrder", barrier=gate.key)
        wait_until(lambda: gate.arrived() == 1)
        operator.click("text=Nodes")
        shot(operator, "nodes")
        operator.click("text=here")
        expect(operator.locator("section[aria-label='Runs now']")).to_contain_text("PlaceOrder")
        shot(operator, "node")
        operator.click("text=Ask to stop")
        operator.click("input[type=submit]")
        expect(operator.locator("#result_list")).to_contain_text("Stopping")
        shot(operator, "node-stopping")
        gate.open()
        wait_until(lambda: Node.objects.filter(stopped_at__isnull=False).exists())


def test_see_what_holds_up_a_batch_retry_it_and_see_it_complete(operator: Page) -> None:
    commands = [BatchCommand("PlaceOrder", uuid7(), {"fail_attempts": 3 if number < 2 else 0}) for number in range(9)]
    callback = uuid7()
    batch_id = create_batch(
        "orders",
        commands,
        name="Orders of May",
        custom_data={"month": "May", "token": "tok_123"},
        on_complete=BatchCommand("SendMail", callback, {}),
    )
    work_off()
    operator.goto("/admin/")
    operator.click("text=Batches")
    shot(operator, "batches")
    expect(operator.locator("#result_list tbody tr")).to_contain_text("2 in troubleshooting")
    operator.click("text=Orders of May")
    expect(operator.locator("h1")).to_contain_text("In progress")
    expect(operator.locator(".cb-trouble-note")).to_contain_text("2 commands wait for an operator")
    assert "tok_123" not in operator.content()
    shot(operator, "batch-in-trouble")

    operator.locator(".cb-counts tr", has_text="In troubleshooting").locator("a").click()
    expect(operator.locator("#result_list tbody tr")).to_have_count(2)
    expect(operator.locator(".cb-bounds")).to_contain_text("Of the batch Orders of May")
    shot(operator, "commands-of-batch")
    operator.locator(".cb-bounds a", has_text="Orders of May").click()

    operator.click("a.cb-button:text-is('Retry')")
    expect(operator.locator("h1")).to_have_text("Retry 2 commands of the batch?")
    operator.fill("[name=reason]", "the stock is back")
    shot(operator, "confirm-retry-batch")
    operator.click("input[type=submit]")
    expect(operator.locator(".messagelist")).to_contain_text("2 commands were sent again.")
    Command.objects.update(max_attempts=5)
    with running_worker():
        wait_until(lambda: Command.objects.filter(command_id=callback, status="COMPLETED").exists())
    operator.reload()
    expect(operator.locator("h1")).to_contain_text("Completed")
    expect(operator.locator("section[aria-label='When it completes']")).to_contain_text("SendMail was sent")
    expect(operator.locator(".cb-actions")).to_contain_text("It has ended: its status is COMPLETED.")
    shot(operator, "batch-completed")
    batch = get_batch("orders", batch_id)
    assert batch is not None
    assert batch.completed_count == 9


def test_a_range_of_dates(operator: Page) -> None:
    send()
    operator.goto("/admin/commandbus/command/")
    operator.fill("#sent-form [name=created_at__range__gte_0]", "2020-01-01")
    operator.fill("#sent-form [name=created_at__range__lte_0]", "2020-01-02")
    operator.click("#sent-form input[type=submit]")
    expect(operator.locator("#changelist")).to_contain_text("0 results")
    shot(operator, "range")
