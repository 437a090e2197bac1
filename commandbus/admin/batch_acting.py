"""What an operator does about a batch: asked first, then done, then told, and back to its page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, InterfaceError
from django.http import Http404, HttpRequest, HttpResponseBase, HttpResponseRedirect
from django.template.response import TemplateResponse

from commandbus import ops
from commandbus.admin import progress
from commandbus.admin.acting import Answers, so_many, tell_refused, was
from commandbus.admin.forms import CancelBatchForm, ReasonForm, SealForm
from commandbus.admin.targets import AT_MOST
from commandbus.batches import get_batch, seal_batch
from commandbus.exceptions import CommandBusError
from commandbus.messages import BatchMetadata

if TYPE_CHECKING:
    from commandbus.admin.batch import BatchAdmin

Run = Callable[[HttpRequest, BatchMetadata, Answers, ops.Progress], None]


@dataclass(frozen=True, kw_only=True)
class BatchAction:
    name: str
    permission: str
    label: str
    explanation: str
    run: Run
    is_dangerous: bool = False


def _cancel(request: HttpRequest, batch: BatchMetadata, answers: Answers, progress: ops.Progress) -> None:
    result = ops.cancel_batch(
        batch.domain,
        batch.batch_id,
        answers["reason"],
        operator=request.user.get_username(),
        troubleshooting=answers["troubleshooting"],
        progress=progress,
        at_most=AT_MOST,
    )
    messages.success(request, f"The batch was canceled, and {so_many(len(result.done))} with it.")
    _tell_refused(request, batch, result)
    now = get_batch(batch.domain, batch.batch_id) or batch
    troubled = now.in_troubleshooting_count
    if len(result.done) + len(result.refused) >= AT_MOST:
        _tell_left(request, "cancel", now.waiting_count + (troubled if answers["troubleshooting"] else 0))
    elif (running := now.waiting_count) > 0:
        messages.info(request, f"{so_many(running)} {_does(running, 'run')}, and {_does(running, 'go', 'goes')} on.")
    if troubled > 0 and not answers["troubleshooting"]:
        what = f"{so_many(troubled)} {_does(troubled, 'are', 'is')} in the Troubleshooting Queue"
        resolved = f"before {_does(troubled, 'they are', 'it is')} resolved"
        messages.info(request, f"{what}, and the batch does not complete {resolved}.")


def _retry(request: HttpRequest, batch: BatchMetadata, answers: Answers, progress: ops.Progress) -> None:
    result = ops.retry_batch(
        batch.domain,
        batch.batch_id,
        operator=request.user.get_username(),
        reason=answers["reason"] or None,
        progress=progress,
        at_most=AT_MOST,
    )
    messages.success(request, f"{so_many(len(result.done))} {was(len(result.done))} sent again.")
    _tell_refused(request, batch, result)
    if len(result.done) + len(result.refused) >= AT_MOST:
        now = get_batch(batch.domain, batch.batch_id) or batch
        _tell_left(request, "retry", now.in_troubleshooting_count)


def _seal(request: HttpRequest, batch: BatchMetadata, answers: Answers, progress: ops.Progress) -> None:
    allow_incomplete = bool(answers.get("allow_incomplete"))
    operator = request.user.get_username()
    seal_batch(batch.domain, batch.batch_id, allow_incomplete=allow_incomplete, operator=operator)
    messages.success(request, "The batch was sealed.")


ACTIONS = {
    action.name: action
    for action in (
        BatchAction(
            name="retry",
            permission="retry_batch",
            label="Retry",
            explanation="Those of its commands that are in the Troubleshooting Queue are sent again with their data, "
            "under their ids, and workers take them up.",
            run=_retry,
        ),
        BatchAction(
            name="seal",
            permission="seal_batch",
            label="Seal",
            explanation="Nothing can be added to the batch any more. It completes when its commands have ended.",
            run=_seal,
        ),
        BatchAction(
            name="cancel",
            permission="cancel_batch",
            label="Cancel",
            explanation="The batch takes no more commands, and those that wait for a worker end as canceled, for ever. "
            "Whoever sent them gets the replies. What runs goes on, and what fails is tried again: cancel once "
            "more to end that.",
            run=_cancel,
            is_dangerous=True,
        ),
    )
}


def why_not(name: str, batch: BatchMetadata) -> str | None:
    """What the database would answer; it is asked again when somebody acts."""
    if name == "seal" and not batch.is_open:
        return "It was canceled, and takes no more commands." if batch.canceled_at else "It is sealed."
    if batch.is_complete:
        return f"It has ended: its status is {batch.status}."
    if name == "retry" and batch.in_troubleshooting_count <= 0:
        return "None of its commands is in the Troubleshooting Queue."
    return None


def act_view(admin: BatchAdmin, request: HttpRequest, domain: str, batch_id: UUID, name: str) -> HttpResponseBase:
    """GET asks, POST acts."""
    action = ACTIONS.get(name)
    if action is None:
        raise Http404(f"There is no action {name!r}; there are {', '.join(ACTIONS)}.")
    if not admin.has_view_permission(request) or not admin.may(request, action.permission):
        raise PermissionDenied
    try:
        batch = get_batch(domain, batch_id)
    except CommandBusError:
        batch = None
    if batch is None:
        raise Http404(f"There is no batch {batch_id} in domain {domain!r}; it may have been pruned.")
    back = admin.url_of_batch(domain, batch_id)
    if (reason := why_not(name, batch)) is not None:
        messages.warning(request, reason)
        return HttpResponseRedirect(back)
    form = _form(name, batch, request.POST if request.method == "POST" else None)
    if request.method != "POST" or not form.is_valid():
        return _ask(admin, request, action, batch, form, back)
    _run(request, action, batch, form.cleaned_data)
    return HttpResponseRedirect(back)


def _run(request: HttpRequest, action: BatchAction, batch: BatchMetadata, answers: Answers) -> None:
    dealt_with = 0

    def progress(count: int, total: int) -> None:
        nonlocal dealt_with
        dealt_with = count

    try:
        action.run(request, batch, answers, progress)
    except (CommandBusError, DatabaseError, InterfaceError) as error:
        messages.error(request, f"{str(error).strip()}. {so_many(dealt_with)} {was(dealt_with)} dealt with before.")


def _ask(
    admin: BatchAdmin, request: HttpRequest, action: BatchAction, batch: BatchMetadata, form: forms.Form, back: str
) -> HttpResponseBase:
    troubled = batch.in_troubleshooting_count
    context = admin.page(
        request,
        f"Retry {so_many(troubled)} of the batch?" if action.name == "retry" else f"{action.label} the batch?",
        explanation=action.explanation,
        is_dangerous=action.is_dangerous,
        batch=batch,
        bar=progress.bar(batch),
        legend=progress.legend(batch),
        at_most=AT_MOST if action.name != "seal" and batch.waiting_count + troubled > AT_MOST else None,
        form=form,
        back=back,
    )
    return TemplateResponse(request, "admin/commandbus/batch/confirm.html", context)


def _form(name: str, batch: BatchMetadata, posted: Any) -> forms.Form:
    if name == "cancel":
        return CancelBatchForm(posted)
    if name == "retry":
        return ReasonForm(posted)
    return SealForm(posted, total=batch.total_count, expected=batch.expected_count)


def _tell_refused(request: HttpRequest, batch: BatchMetadata, result: ops.ActionResult) -> None:
    tell_refused(request, [(f"{batch.domain}/{command_id}", why) for command_id, why in result.refused.items()])


def _tell_left(request: HttpRequest, name: str, left: int) -> None:
    if left > 0:
        what = f"{so_many(left)} of the batch {_does(left, 'are', 'is')} left"
        messages.warning(request, f"{what}: do it again, or let manage.py commandbus_batch {name} do all.")


def _does(count: int, many: str, one: str | None = None) -> str:
    return (one or f"{many}s") if count == 1 else many
