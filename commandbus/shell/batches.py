"""Batches as a table, and one batch with all that is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from uuid import UUID

from django.core.management.base import OutputWrapper
from django.utils import timezone

from commandbus.api import database_of
from commandbus.batches import list_batch_commands, list_batches, require_batch
from commandbus.messages import BatchMetadata, BatchStatus, Status
from commandbus.models import Audit, Command
from commandbus.shell.table import age, ago, json_text, moment, shortened
from commandbus.shell.troubleshooting import events, fields, history, rows
from commandbus.text import number, plain, table

NAME_WIDTH = 40
SHOWN = 10


def show_list(
    domain: str, status: BatchStatus | None, out: OutputWrapper, *, limit: int, as_json: bool = False
) -> None:
    """The newest batches first."""
    found = list_batches(domain, status=status, limit=limit + 1)
    batches, more = found[:limit], len(found) > limit
    if as_json:
        out.write(json_text({"batches": [_fields(batch) for batch in batches], "more": more}))
    elif batches:
        out.write("\n".join(_rows(batches)))
        if more:
            out.write("\nthere are more; --limit shows them")
    else:
        out.write(f"there are no batches {'' if status is None else 'like that '}in {domain}")


def _rows(batches: Sequence[BatchMetadata]) -> list[str]:
    now = timezone.now()
    header = ("ID", "NAME", "STATUS", "ENDED", "TOTAL", "FAILED", "CANCELED", "TROUBLESHOOTING", "CREATED", "AGE", "")
    cells = [
        (
            str(batch.batch_id),
            shortened(batch.name or "", NAME_WIDTH),
            batch.status,
            number(batch.ended_count),
            number(batch.total_count),
            number(batch.failed_count),
            number(batch.canceled_count),
            number(batch.in_troubleshooting_count),
            moment(batch.created_at),
            age((now - batch.created_at).total_seconds()),
            _remark(batch),
        )
        for batch in batches
    ]
    return table(header, cells, right=[3, 4, 5, 6, 7, 9])


def _remark(batch: BatchMetadata) -> str:
    """What its status does not say."""
    remarks = {
        "open": batch.is_open,
        "canceled": batch.canceled_at is not None,
        "on complete failed": batch.callback_error is not None,
    }
    return ", ".join(remark for remark, is_so in remarks.items() if is_so)


def show_batch(domain: str, batch_id: UUID, out: OutputWrapper, *, as_json: bool = False) -> None:
    """With the first of its commands that need an eye."""
    batch = require_batch(domain, batch_id)
    failed = list_batch_commands(domain, batch_id, status=Status.FAILED, limit=SHOWN)
    troubled = list_batch_commands(domain, batch_id, status=Status.IN_TROUBLESHOOTING_QUEUE, limit=SHOWN)
    audit = _audit(batch)
    if as_json:
        body = {
            "batch": _fields(batch),
            "failed": [fields(command) for command in failed],
            "in_troubleshooting": [fields(command) for command in troubled],
            "audit": events(audit),
        }
        out.write(json_text(body))
        return
    blocks = [
        _facts(batch),
        _json_block("CUSTOM DATA", batch.custom_data),
        _json_block("ON COMPLETE", batch.on_complete),
        _commands("FAILED", failed, batch.failed_count),
        _commands("IN TROUBLESHOOTING", troubled, batch.in_troubleshooting_count),
        history(audit) if audit else [],
    ]
    out.write("\n\n".join("\n".join(block) for block in blocks if block))


def _audit(batch: BatchMetadata) -> list[Audit]:
    """Of the batch itself, oldest first."""
    # The bound on ts lets PostgreSQL skip the partitions of the months before.
    audit = Audit.objects.using(database_of(batch.domain)).filter(
        domain=batch.domain, batch_id=batch.batch_id, command_id=None, ts__gte=batch.created_at
    )
    return list(audit.order_by("ts", "audit_id"))


def _fields(batch: BatchMetadata) -> dict[str, Any]:
    return {**asdict(batch), "ended_count": batch.ended_count, "waiting_count": batch.waiting_count}


def _facts(batch: BatchMetadata) -> list[str]:
    times = {
        "created at": batch.created_at,
        "sealed at": batch.sealed_at,
        "started at": batch.started_at,
        "canceled at": batch.canceled_at,
        "completed at": batch.completed_at,
        "last counted at": batch.updated_at,
        "on complete sent at": batch.callback_sent_at,
    }
    facts = {
        "batch": str(batch.batch_id),
        "domain": batch.domain,
        "name": plain(batch.name or ""),
        "status": f"{batch.status}{', open' if batch.is_open else ''}",
        "commands": _total(batch),
        "completed": number(batch.completed_count),
        "failed": number(batch.failed_count),
        "canceled": number(batch.canceled_count),
        "in troubleshooting": number(batch.in_troubleshooting_count),
        "waiting or running": number(batch.waiting_count),
        **{name: ago(value) for name, value in times.items() if value is not None},
        "on complete failed": plain(batch.callback_error or ""),
    }
    first, *rest = [(name, value) for name, value in facts.items() if value]
    return table(first, rest)


def _total(batch: BatchMetadata) -> str:
    expected = batch.expected_count
    if expected is None or expected == batch.total_count:
        return number(batch.total_count)
    return f"{number(batch.total_count)} of {number(expected)} that are expected"


def _json_block(title: str, value: dict[str, Any] | None) -> list[str]:
    return [] if value is None else [title, plain(json_text(value), lines=True)]


def _commands(title: str, commands: list[Command], count: int) -> list[str]:
    if not commands:
        return []
    more = count - len(commands)
    return [title, *rows(commands), *([f"… and {number(more)} more"] if more > 0 else [])]
