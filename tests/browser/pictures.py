"""The pictures of README.md and docs: `make screenshots`. Not one of the tests that `make test-browser` runs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from django.db.models import F
from django.db.models.functions import Now
from playwright.sync_api import Page

from commandbus import BatchCommand, create_batch, send_command, uuid7
from commandbus.messages import ErrorInfo, Failure, Finish, Status
from commandbus.models import Audit, Batch, Command
from commandbus.transitions import PostgresTransitions
from tests.batches.helpers import fold_batches
from tests.helpers import BOTH

pytestmark = pytest.mark.django_db(transaction=True, databases=BOTH)

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
BUS = PostgresTransitions("default")
TRACEBACK = """Traceback (most recent call last):
  File "payments/handlers.py", line 34, in debit_account
    bank.debit(debit.account, debit.amount)
  File "payments/bank.py", line 18, in debit
    raise TransientCommandError("BANK_DOWN", "the bank does not answer")
commandbus.exceptions.TransientCommandError: BANK_DOWN: the bank does not answer
"""
DOWN = ErrorInfo("TransientCommandError", "BANK_DOWN", "the bank does not answer", None, TRACEBACK)
INVALID = ErrorInfo("InvalidDataError", "INVALID_DATA", "amount: must be a number", {"amount": "must be a number"})
FULL = ErrorInfo("OSError", "OSError", "[Errno 28] No space left on device: '/var/reports/2026-10.pdf'")


def send(domain: str, command_type: str, **data: object) -> UUID:
    return send_command(domain, command_type, uuid7(), data)


def batch(name: str, count: int) -> UUID:
    commands = [BatchCommand("RenderReport", uuid7(), {"customer": number}) for number in range(count)]
    on_complete = BatchCommand("MailReports", uuid7(), {})
    return create_batch("reports", commands, name=name, custom_data={"pages": "A4"}, on_complete=on_complete)


def fail(domain: str, error: ErrorInfo, delay: float | None = None) -> None:
    [received] = BUS.receive(domain, qty=1, vt=30)
    BUS.fail(domain, [Failure(received.lease, error, delay)])


def complete(domain: str) -> None:
    [received] = BUS.receive(domain, qty=1, vt=30)
    BUS.finish(domain, [Finish(received.lease, Status.COMPLETED, {"balance": "990.00"})])


def in_time(command_id: UUID, *seconds: float) -> None:
    """Let the steps of a command have happened so long after its sending."""
    events = list(Audit.objects.filter(command_id=command_id).order_by("audit_id").values_list("audit_id", flat=True))
    for audit_id, after in zip(events, (0, *seconds), strict=False):
        Audit.objects.filter(audit_id=audit_id).update(ts=F("ts") + timedelta(seconds=after))


def picture(page: Page, name: str, height: int) -> None:
    IMAGES.mkdir(exist_ok=True)
    page.evaluate("window.scrollTo(0, 0)")
    page.set_viewport_size({"width": 1280, "height": height})
    page.screenshot(path=IMAGES / f"{name}.png")


def test_pictures(operator: Page) -> None:
    for number in range(12):
        send("payments", "DebitAccount", account=f"DE-{number}", amount="a lot" if number % 3 else None)
        fail("payments", INVALID)
    for _ in range(30):
        send("payments", "DebitAccount", account="DE-1", amount="10.00")
        fail("payments", DOWN)
    send("reports", "RenderReport", month="2026-10")
    fail("reports", FULL)
    hero = send("payments", "DebitAccount", account="DE-1", amount="10.00", bank={"name": "First", "api_key": "k-77"})
    for _ in range(3):
        fail("payments", DOWN, 0)
    Command.objects.filter(command_id=hero).update(created_at=F("created_at") - timedelta(seconds=80))
    Audit.objects.filter(command_id=hero).update(ts=F("ts") - timedelta(seconds=80))
    in_time(hero, 0.4, 3.2, 13.5, 16.6, 76.8, 79.9)
    for number in range(6):
        send("payments", "DebitAccount", account="DE-2", amount="5.00")
        if number == 2:
            fail("payments", INVALID)
        elif number < 4:
            complete("payments")
        elif number == 4:
            BUS.receive("payments", qty=1, vt=30)

    invoices = batch("Invoices of October", 40)
    for number in range(24):
        if number in (5, 11, 17):
            fail("reports", FULL)
        else:
            complete("reports")
    fold_batches()
    begun = Now() - timedelta(minutes=2)
    Batch.objects.update(created_at=begun, sealed_at=begun, started_at=begun + timedelta(seconds=1))
    Audit.objects.filter(batch_id=invoices, command_id=None).update(ts=begun + timedelta(seconds=1))
    Audit.objects.filter(batch_id=invoices, event_type="BATCH_SEALED").update(ts=begun)
    batch("Invoices of November", 12)

    operator.goto(f"/admin/commandbus/batch/reports/{invoices}/change/")
    picture(operator, "batch", 920)
    operator.goto("/admin/commandbus/troubledcommand/")
    picture(operator, "troubleshooting", 420)
    operator.goto(f"/admin/commandbus/command/payments/{hero}/change/")
    operator.locator("summary", has_text="Traceback").last.click()
    picture(operator, "command", 1160)
    operator.goto("/admin/commandbus/command/?domain=payments")
    picture(operator, "commands", 700)
