"""All that is known of one command, and what can be done about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.http import HttpRequest
from django.utils import timezone

from commandbus import conf, ops, search
from commandbus.admin import timeline
from commandbus.admin.acting import ACTIONS, Action
from commandbus.admin.pretty import pretty
from commandbus.masking import masked
from commandbus.messages import TERMINAL, Status
from commandbus.models import Audit, Batch, Command, Domain, Node

if TYPE_CHECKING:
    from commandbus.admin.command import CommandAdmin

MOST_EVENTS = 200
FIRST_EVENTS = 20
RELATED = 20


@dataclass(frozen=True, kw_only=True)
class Button:
    label: str
    url: str
    why_not: str | None


def command_page(admin: CommandAdmin, request: HttpRequest, command: Command) -> dict[str, Any]:
    using = conf.current().database_of(command.domain)
    mask = conf.current().mask
    payload = ops.get_payload(command.domain, command.command_id)
    events, left_out = _events(command, using)
    nodes = _node_names(command, events, using)
    for event in events:
        event.details_json = masked(event.details_json, mask)
    found = search.find(search.Search(either_id=command.correlation_id), using, at_most=RELATED + 1)
    related = [one for one in search.commands_of(found, using) if one.pk != command.pk]
    return admin.page(
        request,
        f"{command.command_type} {command.command_id}",
        command=command,
        database=using if conf.current().has_several_databases else None,
        buttons=[_button(admin, request, action, command, payload, using) for action in ACTIONS.values()],
        payload=None if payload is None else pretty(masked(payload, mask)),
        reply=None if command.reply is None else pretty(masked(command.reply, mask)),
        first_steps=timeline.steps(events[:FIRST_EVENTS] if left_out else events, nodes),
        left_out=left_out,
        last_steps=timeline.steps(events[FIRST_EVENTS:] if left_out else [], nodes),
        open_gap=timeline.open_gap(command, events, timezone.now()),
        error_message=masked(command.last_error_msg or "", mask),
        operator_retries=timeline.operator_retries(events),
        node=nodes.get(str(command.node_id)),
        related=related[:RELATED],
        more_related=found.more or len(related) > RELATED,
        batch=None if command.batch_id is None else Batch.objects.using(using).filter(pk=command.batch_id).first(),
        batch_url=admin.url_of_batch(command.domain, command.batch_id) if command.batch_id else "",
        batch_query=urlencode({"batch": str(command.batch_id), "domain": command.domain}),
        correlation_query=urlencode({"q": str(command.correlation_id), "database": using}),
        is_masked=bool(mask),
    )


def _events(command: Command, using: str) -> tuple[list[Audit], int]:
    """The first and the last, oldest first, and how many of those between are left out."""
    # The bound on ts lets PostgreSQL skip the partitions of the months before.
    events = Audit.objects.using(using).filter(
        domain=command.domain, command_id=command.command_id, ts__gte=command.created_at
    )
    first = list(events.order_by("ts", "audit_id")[: MOST_EVENTS + 1])
    if len(first) <= MOST_EVENTS:
        return first, 0
    last = list(events.order_by("-ts", "-audit_id")[: MOST_EVENTS - FIRST_EVENTS])[::-1]
    between = events.filter(ts__gt=first[FIRST_EVENTS - 1].ts, ts__lt=last[0].ts)
    return first[:FIRST_EVENTS] + last, between.count()


def _node_names(command: Command, events: list[Audit], using: str) -> dict[str, str]:
    details = [event.details_json for event in events if isinstance(event.details_json, dict)]
    ids = {str(one.get("node_id")) for one in details} | {str(command.node_id)}
    known = Node.objects.using(using).filter(node_id__in=[one for one in ids if search.WHOLE_ID.fullmatch(one)])
    return {str(node_id): name for node_id, name in known.values_list("node_id", "name")}


def _button(
    admin: CommandAdmin,
    request: HttpRequest,
    action: Action,
    command: Command,
    payload: dict[str, Any] | None,
    using: str,
) -> Button:
    target = urlencode(
        {"command": f"{command.domain}/{command.command_id}", "back": admin.url_of(command.domain, command.command_id)}
    )
    why_not = _why_not(action, command, payload, using)
    if not admin.may(request, action.permission):
        why_not = f"You need the permission “{action.permission}” for this."
    return Button(
        label=action.label, url=f"{admin.url('commandbus_command_act', action.name)}?{target}", why_not=why_not
    )


def _why_not(action: Action, command: Command, payload: dict[str, Any] | None, using: str) -> str | None:
    """What the database would answer; it is asked again when somebody acts."""
    if command.status in TERMINAL:
        return f"It has ended: its status is {command.status}."
    if command.lease_read_ct is not None:
        return "A worker runs it."
    if action.name == "cancel":
        return None
    if command.status != Status.IN_TROUBLESHOOTING_QUEUE:
        return "It waits for a worker. This is for commands in the Troubleshooting Queue."
    if action.name == "retry" and payload is None:
        return "Its data are no longer in the archive."
    if action.name == "edit" and Domain.objects.using(using).filter(name=command.domain, replies=True).exists():
        return "It is a reply, which nobody may change."
    return None
