"""What an operator does about commands: asked first, then done, then told, and back to where they came from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, InterfaceError
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponseBase, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils.html import format_html, format_html_join
from django.utils.http import url_has_allowed_host_and_scheme

from commandbus import conf, ops
from commandbus.admin.forms import CancelForm, CompleteForm, EditForm, ReasonForm
from commandbus.admin.targets import Target, chosen_rows, read_target
from commandbus.exceptions import CommandBusError
from commandbus.masking import masked
from commandbus.messages import Status
from commandbus.models import Command

if TYPE_CHECKING:
    from commandbus.admin.command import CommandAdmin

SHOWN_REFUSED = 10

Answers = Mapping[str, Any]
"""What was written into the form."""
Run = Callable[[str, ops.Selection, Answers, str, ops.Progress], ops.ActionResult]


@dataclass(frozen=True, kw_only=True)
class Action:
    name: str
    permission: str
    label: str
    done: str
    explanation: str
    run: Run
    form: type[ReasonForm] = ReasonForm
    is_dangerous: bool = False


def _retry(
    domain: str, chosen: ops.Selection, answers: Answers, operator: str, progress: ops.Progress
) -> ops.ActionResult:
    return ops.operator_retry_many(
        domain, chosen, operator=operator, reason=answers["reason"] or None, progress=progress
    )


def _edit(
    domain: str, chosen: ops.Selection, answers: Answers, operator: str, progress: ops.Progress
) -> ops.ActionResult:
    edits: dict[UUID, Any] = dict.fromkeys(chosen.messages, answers["payload"])
    return ops.operator_edit_many(
        domain, edits, operator=operator, reason=answers["reason"] or None, progress=progress, seen=chosen
    )


def _complete(
    domain: str, chosen: ops.Selection, answers: Answers, operator: str, progress: ops.Progress
) -> ops.ActionResult:
    return ops.operator_complete_many(
        domain, chosen, answers["result"], operator=operator, reason=answers["reason"] or None, progress=progress
    )


def _cancel(
    domain: str, chosen: ops.Selection, answers: Answers, operator: str, progress: ops.Progress
) -> ops.ActionResult:
    """Those that wait for a worker, and those that wait for an operator."""
    using, reason = conf.current().database_of(domain), answers["reason"]
    commands = Command.objects.using(using).these(domain, chosen.messages)
    waiting = set(commands.filter(status=Status.PENDING).values_list("command_id", flat=True))
    parts = [
        ops.Selection({one: msg_id for one, msg_id in chosen.messages.items() if (one in waiting) is waits})
        for waits in (True, False)
    ]
    first = ops.cancel_waiting_many(domain, parts[0], reason, operator=operator, progress=progress)

    def both(dealt_with: int, total: int) -> None:
        progress(len(parts[0].messages) + dealt_with, len(chosen.messages))

    second = ops.operator_cancel_many(domain, parts[1], reason, operator=operator, progress=both)
    return ops.ActionResult(done=first.done + second.done, refused={**first.refused, **second.refused})


ACTIONS = {
    action.name: action
    for action in (
        Action(
            name="retry",
            permission="retry_command",
            label="Retry",
            done="sent again",
            explanation="Each command is sent again with its data, under its id, and a worker takes it up.",
            run=_retry,
        ),
        Action(
            name="edit",
            permission="edit_command_payload",
            label="Edit data and retry",
            done="sent again with new data",
            explanation="The command is sent again under its id, with other data.",
            run=_edit,
            form=EditForm,
        ),
        Action(
            name="complete",
            permission="complete_command",
            label="Complete",
            done="completed",
            explanation="For what somebody has done by other means. The command ends as completed; no handler runs, "
            "and whoever sent it gets the reply.",
            run=_complete,
            form=CompleteForm,
        ),
        Action(
            name="cancel",
            permission="cancel_command",
            label="Cancel",
            done="canceled",
            explanation="The command ends as canceled, for ever. Whoever sent it gets the reply.",
            run=_cancel,
            form=CancelForm,
            is_dangerous=True,
        ),
    )
}


def ask_about_rows(
    admin: CommandAdmin, request: HttpRequest, name: str, commands: QuerySet[Command]
) -> HttpResponseBase:
    """The answer to an action of a list: nothing is done yet."""
    action, target = ACTIONS[name], chosen_rows(commands, back=request.get_full_path())
    return _ask(admin, request, action, target, _form(action, target, None))


def act_view(admin: CommandAdmin, request: HttpRequest, name: str) -> HttpResponseBase:
    """GET asks, POST acts."""
    action = ACTIONS.get(name)
    if action is None:
        raise Http404(f"There is no action {name!r}; there are {', '.join(ACTIONS)}.")
    if not admin.has_view_permission(request) or not admin.may(request, action.permission):
        raise PermissionDenied
    try:
        target = read_target(request.POST if request.method == "POST" else request.GET)
    except CommandBusError as error:
        messages.error(request, str(error))
        return _back(admin, request, "")
    if name == "edit" and target.count != 1:
        raise Http404("Data are edited one command at a time.")
    try:
        form = _form(action, target, request.POST if request.method == "POST" else None)
    except CommandBusError as error:
        messages.error(request, f"Its data cannot be edited here. {error}.")
        return _back(admin, request, target.back)
    if request.method != "POST" or not form.is_valid():
        return _ask(admin, request, action, target, form)
    _run(request, action, target, form.cleaned_data)
    return _back(admin, request, target.back)


def _run(request: HttpRequest, action: Action, target: Target, answers: Answers) -> None:
    done, refused = 0, []
    operator = request.user.get_username()
    if target.gone:
        messages.warning(
            request,
            f"{so_many(target.gone)} {was(target.gone)} resolved or retried by somebody else since you were asked.",
        )
    for domain, selection in target.selections().items():
        dealt_with = 0

        def progress(count: int, total: int) -> None:
            nonlocal dealt_with
            dealt_with = count

        try:
            result = action.run(domain, selection, answers, operator, progress)
        except (CommandBusError, DatabaseError, InterfaceError) as error:
            what = f"{domain}: {str(error).strip()}"
            messages.error(
                request, f"{what}. Of {so_many(len(selection.messages))}, {dealt_with:,} were dealt with before."
            )
            continue
        done += len(result.done)
        refused += [(f"{domain}/{command_id}", why) for command_id, why in result.refused.items()]
    if done:
        messages.success(request, f"{so_many(done)} {was(done)} {action.done}.")
    tell_refused(request, refused)
    if target.is_cut:
        messages.info(request, f"Those were the oldest {target.count:,} of the group; do it again for the rest.")


def tell_refused(request: HttpRequest, refused: Sequence[tuple[str, str]]) -> None:
    """`refused`: which commands, and why."""
    if not refused:
        return
    listed = format_html_join("", "<li><code>{}</code>: {}</li>", refused[:SHOWN_REFUSED])
    more = f"… and {len(refused) - SHOWN_REFUSED:,} more" if len(refused) > SHOWN_REFUSED else ""
    what = f"{so_many(len(refused))} {was(len(refused))}"
    messages.warning(request, format_html("{} left alone:<ul>{}</ul>{}", what, listed, more))


def _ask(
    admin: CommandAdmin, request: HttpRequest, action: Action, target: Target, form: forms.Form
) -> HttpResponseBase:
    if not target.count:
        messages.warning(request, "Nothing like that is in the Troubleshooting Queue any more.")
        return _back(admin, request, target.back)
    shown = target.shown()
    context = admin.page(
        request,
        f"{action.label} {so_many(target.count)}{' or more' if target.is_cut else ''}?",
        explanation=action.explanation,
        is_dangerous=action.is_dangerous,
        hidden=target.hidden(),
        action_url=admin.url("commandbus_command_act", action.name),
        target=target,
        count=so_many(target.count),
        shown=[(command, admin.url_of(command.domain, command.command_id)) for command in shown],
        not_shown=target.count - len(shown),
        form=form,
        back=_safe(request, target.back) or admin.url("commandbus_command_changelist"),
    )
    return TemplateResponse(request, "admin/commandbus/command/confirm.html", context)


def _form(action: Action, target: Target, posted: Any) -> ReasonForm:
    if action.form is not EditForm:
        return action.form(posted)
    [(domain, selection)] = target.selections().items()
    [command_id] = selection.messages
    before, mask = ops.get_payload(domain, command_id, exactly=True), conf.current().mask
    shown = json.dumps(masked(before or {}, mask), indent=2, ensure_ascii=False)
    return EditForm(posted, before=before, mask=mask, initial={"payload": shown})


def _back(admin: CommandAdmin, request: HttpRequest, url: str) -> HttpResponseRedirect:
    return HttpResponseRedirect(_safe(request, url) or admin.url("commandbus_command_changelist"))


def _safe(request: HttpRequest, url: str) -> str | None:
    here = {request.get_host()}
    return url if url_has_allowed_host_and_scheme(url, here, require_https=request.is_secure()) else None


def so_many(count: int) -> str:
    return f"{count:,} command{'' if count == 1 else 's'}"


def was(count: int) -> str:
    return "was" if count == 1 else "were"
