"""Actions on all commands of a batch. In chunks that commit by themselves, like all actions on many."""

from __future__ import annotations

from uuid import UUID

from django.db import transaction

from commandbus.api import database_of, uuid_of
from commandbus.batches import require_batch
from commandbus.folding import fold_after_commit
from commandbus.messages import Status, storable
from commandbus.models import Command
from commandbus.models.command import CommandQuerySet
from commandbus.ops.troubleshooting import (
    ActionResult,
    Progress,
    Selection,
    cancel_waiting_many,
    operator_cancel_many,
    operator_retry_many,
    require_reason,
)
from commandbus.transitions import PostgresTransitions


def cancel_batch(
    domain: str,
    batch_id: UUID,
    reason: str,
    *,
    operator: str | None = None,
    troubleshooting: bool = False,
    progress: Progress | None = None,
    at_most: int | None = None,
) -> ActionResult:
    """Seal a batch and cancel those of its commands that wait for a worker. What runs goes on.

    What runs and fails waits to be tried again, as always: cancel the batch once more to end that too.

    With `troubleshooting` also those in the Troubleshooting Queue; else they wait for an operator, and the batch with
    them. If it is interrupted, call it again: it goes on where it was. `at_most`: only so many now.
    """
    require_reason(reason)
    using, batch_id = database_of(domain), uuid_of(batch_id, "batch_id")
    with transaction.atomic(using=using):
        PostgresTransitions(using).cancel_batch(
            domain, batch_id, storable(reason), None if operator is None else storable(operator)
        )
    waiting = waiting_in(domain, batch_id, at_most=at_most)
    result = cancel_waiting_many(domain, waiting, reason, operator=operator, progress=progress)
    if troubleshooting:
        dealt_with = len(result.done) + len(result.refused)
        troubled = troubled_in(domain, batch_id, at_most=None if at_most is None else at_most - dealt_with)
        further = None if progress is None else _going_on(progress, dealt_with)
        more = operator_cancel_many(domain, troubled, reason, operator=operator, progress=further)
        result.done.extend(more.done)
        result.refused.update(more.refused)
    fold_after_commit(using)
    return result


def retry_batch(
    domain: str,
    batch_id: UUID,
    *,
    operator: str | None = None,
    reason: str | None = None,
    progress: Progress | None = None,
    at_most: int | None = None,
) -> ActionResult:
    """Send those commands of a batch again that are in the Troubleshooting Queue."""
    batch_id = require_batch(domain, uuid_of(batch_id, "batch_id")).batch_id
    troubled = troubled_in(domain, batch_id, at_most=at_most)
    return operator_retry_many(domain, troubled, operator=operator, reason=reason, progress=progress)


def waiting_in(domain: str, batch_id: UUID, *, at_most: int | None = None) -> Selection:
    """Those commands of a batch that wait for a worker."""
    commands = Command.objects.using(database_of(domain)).filter(batch_id=batch_id, lease_read_ct=None)
    return _selected(commands.filter(status=Status.PENDING.value).order_by("id")[:at_most])


def troubled_in(domain: str, batch_id: UUID, *, at_most: int | None = None) -> Selection:
    """Those commands of a batch that wait for an operator."""
    commands = Command.objects.using(database_of(domain)).filter(batch_id=batch_id)
    return _selected(commands.filter(rare_status=Status.IN_TROUBLESHOOTING_QUEUE.value).order_by("id")[:at_most])


def _going_on(progress: Progress, already: int) -> Progress:
    """For a second action, so that it does not begin to count anew."""
    return lambda count, total: progress(already + count, already + total)


def _selected(commands: CommandQuerySet) -> Selection:
    return Selection({command_id: msg_id or 0 for command_id, msg_id in commands.values_list("command_id", "msg_id")})
