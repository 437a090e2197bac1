"""All that is known of one batch, and what can be done about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode
from uuid import UUID

from django.http import HttpRequest
from django.utils import timezone

from commandbus import conf
from commandbus.admin import progress, timeline
from commandbus.admin.batch_acting import ACTIONS, BatchAction, why_not
from commandbus.admin.command_page import Button
from commandbus.admin.pretty import pretty
from commandbus.api import get_command
from commandbus.masking import masked
from commandbus.messages import BatchMetadata, Status
from commandbus.models import Audit, Command

if TYPE_CHECKING:
    from commandbus.admin.batch import BatchAdmin

MOST_EVENTS = 200


@dataclass(frozen=True, kw_only=True)
class Count:
    part: progress.Part
    share: float
    """In percent."""
    url: str
    """Of the list of these commands, if they have one status."""
    links: list[tuple[str, str]]
    """To those of each status, if they have several."""


def batch_page(admin: BatchAdmin, request: HttpRequest, batch: BatchMetadata) -> dict[str, Any]:
    using, mask = conf.current().database_of(batch.domain), conf.current().mask
    events = _events(batch, using)
    for event in events:
        event.details_json = masked(event.details_json, mask)
    pace = progress.pace(batch, timezone.now())
    callback_id = UUID(batch.on_complete["command_id"]) if batch.on_complete else None
    return admin.page(
        request,
        f"Batch {batch.name or batch.batch_id}",
        batch=batch,
        database=using if conf.current().has_several_databases else None,
        buttons=[_button(admin, request, action, batch) for action in ACTIONS.values()],
        bar=progress.bar(batch),
        counts=[_count(admin, batch, part) for part in progress.parts(batch)],
        all_url=_commands_url(admin, batch),
        troubled_url=_commands_url(admin, batch, Status.IN_TROUBLESHOOTING_QUEUE),
        pace=pace,
        rate=None if pace.rate is None else progress.rate_text(pace.rate),
        custom_data=None if batch.custom_data is None else pretty(masked(batch.custom_data, mask)),
        callback_id=callback_id,
        callback=_callback(batch, callback_id),
        steps=timeline.steps(events, {}),
    )


def _events(batch: BatchMetadata, using: str) -> list[Audit]:
    """Of the batch itself, oldest first. The bound on ts lets PostgreSQL skip the partitions of the months before."""
    events = Audit.objects.using(using).filter(batch_id=batch.batch_id, command_id=None, ts__gte=batch.created_at)
    return list(events.order_by("ts", "audit_id")[:MOST_EVENTS])


def _count(admin: BatchAdmin, batch: BatchMetadata, part: progress.Part) -> Count:
    names = {Status.PENDING: "those that wait", Status.IN_PROGRESS: "those that run"}
    statuses = part.statuses if part.count and admin.has_commands else ()
    return Count(
        part=part,
        share=100 * part.count / batch.total_count if batch.total_count else 0.0,
        url=_commands_url(admin, batch, statuses[0]) if len(statuses) == 1 else "",
        links=[(names[one], _commands_url(admin, batch, one)) for one in statuses if len(statuses) > 1],
    )


def _commands_url(admin: BatchAdmin, batch: BatchMetadata, status: Status | None = None) -> str:
    if not admin.has_commands:
        return ""
    query = {"batch": str(batch.batch_id), "domain": batch.domain, **({"status": status.value} if status else {})}
    return f"{admin.url('commandbus_command_changelist')}?{urlencode(query)}"


def _callback(batch: BatchMetadata, callback_id: UUID | None) -> Command | None:
    """The command that was sent when it completed, as it is now."""
    if callback_id is None or batch.callback_sent_at is None:
        return None
    return get_command(batch.domain, callback_id)


def _button(admin: BatchAdmin, request: HttpRequest, action: BatchAction, batch: BatchMetadata) -> Button:
    reason = why_not(action.name, batch)
    if not admin.may(request, action.permission):
        reason = f"You need the permission “{action.permission}” for this."
    url = admin.url("commandbus_batch_act", batch.domain, batch.batch_id, action.name)
    return Button(label=action.label, url=url, why_not=reason)
