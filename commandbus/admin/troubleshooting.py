from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, InterfaceError, connections
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse

from commandbus import conf, ops, status
from commandbus.admin.acting import ACTIONS
from commandbus.admin.command_page import Button
from commandbus.admin.databases import databases
from commandbus.admin.readonly import ReadOnlyAdmin
from commandbus.masking import masked
from commandbus.messages import Status
from commandbus.models import TroubledCommand

FOR_GROUPS = ("retry", "complete", "cancel")


@dataclass(frozen=True, kw_only=True)
class Row:
    group: ops.Group
    message: str
    """Of the sample."""
    url: str
    sample_url: str
    buttons: list[Button]


@admin.register(TroubledCommand)
class TroubledCommandAdmin(ReadOnlyAdmin):
    """What waits for an operator, grouped by what went wrong. Single commands are in the list of commands."""

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self.may(request, "view_command")

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "view_command")

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        rows: list[Row] = []
        domains: list[str] = []
        more: list[str] = []
        away: dict[str, str] = {}
        chosen = request.GET.get("domain", "")
        for using in databases():
            try:
                here = status.domains_of(using)
                found = {domain: ops.groups(domain) for domain in here if chosen in ("", domain)}
            except (DatabaseError, InterfaceError) as error:
                away[using] = str(error).strip()
                if not connections[using].in_atomic_block:
                    connections[using].close()
                continue
            domains += here
            for domain, (groups, is_cut) in found.items():
                rows += [self._row(request, group) for group in groups]
                more += [domain] if is_cut else []
        if chosen and chosen not in domains and not away:
            raise Http404(f"There is no domain {chosen!r}.")
        context = self.page(
            request,
            "Troubleshooting",
            rows=sorted(rows, key=lambda row: row.group.last_at, reverse=True),
            total=sum(row.group.count for row in rows),
            more=more,
            away=away,
            domains=[(domain, f"?{urlencode({'domain': domain})}", domain == chosen) for domain in domains],
            chosen=chosen,
        )
        return TemplateResponse(request, "admin/commandbus/troubledcommand/groups.html", context)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        return HttpResponseRedirect(self.url("commandbus_command_change", object_id))

    def _row(self, request: HttpRequest, group: ops.Group) -> Row:
        same = {
            "domain": group.domain,
            "type": group.type,
            "error_type": group.error_type,
            "error_code": group.error_code,
        }
        shown = {"status": Status.IN_TROUBLESHOOTING_QUEUE.value, **same}
        target = urlencode({**same, "back": request.get_full_path()})
        return Row(
            group=group,
            message=masked(group.sample_message or "", conf.current().mask),
            url=f"{self.url('commandbus_command_changelist')}?{urlencode(shown)}" if self.has_commands else "",
            sample_url=self.url_of(group.domain, group.sample_id),
            buttons=[
                Button(
                    label=ACTIONS[name].label,
                    url=f"{self.url('commandbus_command_act', name)}?{target}",
                    why_not=None
                    if self.may(request, ACTIONS[name].permission)
                    else f"You need the permission “{ACTIONS[name].permission}” for this.",
                )
                for name in (FOR_GROUPS if self.has_commands else ())
            ],
        )
