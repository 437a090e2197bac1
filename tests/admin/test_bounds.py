"""With two million commands, no page reads more than a bounded number of PostgreSQL's buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

import pytest
from django.db import connection
from django.test import Client
from django.utils import timezone

from commandbus import nodes
from commandbus.models import Command
from tests.admin.history import BATCH, BUSY, CHAIN, COUNT, GONE, PAIR, fill
from tests.helpers import BOTH, send_many

pytestmark = pytest.mark.django_db(transaction=True, databases=BOTH)

MOST_BUFFERS = 60_000
"""A scan of the table reads more than 100,000."""

COMMANDS = "/admin/commandbus/command/"
AUDIT = "/admin/commandbus/audit/"
BATCHES = "/admin/commandbus/batch/"
NOBODY = UUID(int=99)
WAITING = 20_000


class Buffers:
    """Runs EXPLAIN (ANALYZE, BUFFERS) of every query beside the query itself."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.lstrip().upper().startswith("SELECT"):
            with connection.connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", params)
                [[[explained]]] = cursor.fetchall()
            plan = explained["Plan"]
            self.read += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        return execute(sql, params, many, context)


@contextmanager
def counted() -> Iterator[Buffers]:
    buffers = Buffers()
    with connection.execute_wrapper(buffers):
        yield buffers


def days(field: str, since: float, until: float) -> dict[str, str]:
    now = timezone.now()
    first, last = now - timedelta(days=since), now - timedelta(days=until)
    return {
        f"{field}__range__gte_0": f"{first:%Y-%m-%d}",
        f"{field}__range__gte_1": f"{first:%H:%M:%S}",
        f"{field}__range__lte_0": f"{last:%Y-%m-%d}",
        f"{field}__range__lte_1": f"{last:%H:%M:%S}",
    }


def queries() -> list[tuple[str, dict[str, str]]]:
    """Rare, common and absent values of everything that can be asked for, alone and together."""
    commands: list[dict[str, str]] = [{}, {"o": "3"}, {"p": "10"}, {"beyond": "1000000"}]
    commands += [{"domain": name} for name in ("orders", "other", "sales")]
    commands += [{"type": name} for name in ("PlaceOrder", "Echo", "NewKind")]
    statuses = ("COMPLETED", "FAILED", "CANCELED", "IN_TROUBLESHOOTING_QUEUE", "PENDING", "IN_PROGRESS")
    commands += [{"status": name} for name in statuses]
    commands += [{"error_type": name} for name in ("RefusedError", "RareError", "NoError")]
    commands += [{"error_code": name} for name in ("REFUSED", "RARE", "NO")]
    commands += [{"attempts": number} for number in ("2", "5", "10")]
    commands += [{"node": name} for name in ("busy", "gone", "nobody")]
    commands += [{"q": str(one)} for one in (CHAIN, PAIR, NOBODY)]
    commands += [{"q": text} for text in ("0000", "00000000-2710", "ffff", "mail", "echo", "REFUSED", "RARE", "zzz")]
    for field in ("created_at", "updated_at"):
        commands += [days(field, 10, 9), days(field, 0.01, 0), days(field, 4000, 3999), days(field, -1, -2)]
    commands += [
        {"domain": "other", "status": "FAILED", "type": "PlaceOrder"},
        {"domain": "orders", "status": "IN_TROUBLESHOOTING_QUEUE", "error_code": "RARE"},
        {"status": "COMPLETED", "node": "gone"},
        {"status": "FAILED", **days("created_at", 10, 9)},
        {"q": "mail", "status": "CANCELED"},
        {"q": "0000", "status": "FAILED"},
    ]
    commands += [{"batch": str(one)} for one in (BATCH, NOBODY)]
    commands += [{"batch": str(BATCH), "domain": "orders", "status": name} for name in statuses]
    commands += [
        {"batch": str(BATCH), "o": "3"},
        {"batch": str(BATCH), "error_code": "RARE"},
        {"batch": str(BATCH), "q": "mail"},
        {"q": str(BATCH)},
    ]
    batches: list[dict[str, str]] = [{}, {"o": "2"}, {"p": "10"}, {"beyond": "1000000000000000"}]
    batches += [{"domain": name} for name in ("orders", "other", "sales")]
    batches += [{"status": name} for name in ("PENDING", "IN_PROGRESS", "COMPLETED", "COMPLETED_WITH_FAILURES")]
    batches += [{"q": text} for text in (str(BATCH), str(NOBODY), "0000", "ffff", "Batch", "Rare", "zzz")]
    batches += [days("created_at", 10, 9), days("created_at", 4000, 3999), {"domain": "other", "status": "PENDING"}]
    oldest = Command.objects.order_by("id")[0].command_id
    audit: list[dict[str, str]] = [{}, {"o": "0"}, {"beyond": "1000"}, {"q": str(oldest)}, {"q": str(NOBODY)}]
    audit += [{"q": str(BATCH)}, {"event": "BATCH_CANCELED"}]
    audit += [{"q": "olga"}, {"q": "nobody"}, {"domain": "orders"}, {"domain": "sales"}, days("ts", 12, 11)]
    audit += [{"event": name} for name in ("SENT", "COMPLETED", "RETRY_SCHEDULED", "OPERATOR_RETRY", "FAILED")]
    others = ("troubledcommand", "domain", "node", "unreadablemessage", f"command/orders/{oldest}/change")
    of_batch = ("change", "act/cancel", "act/retry")
    group = {"domain": "orders", "type": "PlaceOrder", "error_type": "RareError", "error_code": "RARE"}
    return [
        *((COMMANDS, query) for query in commands),
        *((AUDIT, query) for query in audit),
        *((BATCHES, query) for query in batches),
        *((f"{BATCHES}orders/{BATCH}/{page}/", {}) for page in of_batch),
        *((f"/admin/commandbus/{page}/", {}) for page in others),
        (f"{COMMANDS}act/retry/", group),
    ]


def test_every_page_reads_a_bounded_number_of_buffers(admin_client: Client) -> None:
    fill()
    send_many("orders", "PlaceOrder", WAITING)
    for node_id, name in ((BUSY, "busy"), (GONE, "gone")):
        nodes.register("default", node_id=node_id, name=name, role="worker", domains=["orders"], handled_types={})
    assert Command.objects.count() == COUNT + WAITING
    read = {}
    for page, query in queries():
        with counted() as buffers:
            assert admin_client.get(page, query).status_code == 200
        assert buffers.read > 0
        read[f"{page}?{urlencode(query)}"] = buffers.read
    assert {name: number for name, number in read.items() if number > MOST_BUFFERS} == {}
