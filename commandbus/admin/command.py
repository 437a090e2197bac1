from __future__ import annotations

from dataclasses import replace
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.html import format_html
from django.utils.safestring import SafeString

from commandbus import search
from commandbus.admin import acting, badges
from commandbus.admin.changelist import BoundedChangeList
from commandbus.admin.command_page import command_page
from commandbus.admin.databases import DatabaseFilter, chosen
from commandbus.admin.dates import range_filter
from commandbus.admin.filters import (
    AttemptsFilter,
    BatchFilter,
    DomainFilter,
    ErrorCodeFilter,
    ErrorTypeFilter,
    NodeFilter,
    SearchFilter,
    StatusFilter,
    TypeFilter,
)
from commandbus.admin.readonly import ReadOnlyAdmin
from commandbus.api import get_command, uuid_of
from commandbus.exceptions import CommandBusError
from commandbus.models import Command


class CommandChangeList(BoundedChangeList):
    def look(self, request: HttpRequest) -> QuerySet[Command]:
        using = chosen(request)
        wanted = replace(search.Search(text=self.query), **self._ranges(request))
        for spec in self.filter_specs:
            if isinstance(spec, SearchFilter):
                wanted = spec.narrow(request, wanted)
        found = search.find(wanted, using, beyond=self.beyond, oldest_first=self.oldest_first)
        self.more, self.next_beyond = found.more, found.beyond
        if found.more and not wanted.text:
            self.estimate = max(search.estimated_total(wanted, using), len(found.rows))
        return search.commands_of(found, using, oldest_first=self.oldest_first)

    def _ranges(self, request: HttpRequest) -> dict[str, Any]:
        ranges = {}
        for spec in self.filter_specs:
            if limits := getattr(spec, "limits", None):
                name = str(getattr(spec, "field_path", "")).removesuffix("_at")
                ranges[f"{name}_from"], ranges[f"{name}_until"] = limits(request)
        return ranges

    @property
    def of_batch(self) -> dict[str, Any] | None:
        """Of which batch these are, if they are of one: to look at it, and to leave it."""
        spec = next((spec for spec in self.filter_specs if isinstance(spec, BatchFilter)), None)
        if spec is None:
            return None
        batch = spec.batch
        url = self.model_admin.url_of_batch(batch.domain, batch.batch_id) if batch else ""  # type: ignore[attr-defined]
        return {"name": str(batch or spec.batch_id), "url": url, "all": self.get_query_string(remove=["batch"])}

    def url_for_result(self, result: Any) -> str:
        return str(self.model_admin.url_of(result.domain, result.command_id))  # type: ignore[attr-defined]


@admin.register(Command)
class CommandAdmin(ReadOnlyAdmin):
    list_display = ("name", "state", "sent")
    list_display_links = ("name",)
    search_fields = ("command_id",)  # only that there is a search box; see commandbus.search
    search_help_text = "A command id or its beginning, a correlation id, a batch id, a type or an error code"
    ordering = ("-id",)
    sortable_by = ("sent",)
    actions = ("retry", "cancel", "complete")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[BoundedChangeList]:
        return CommandChangeList

    def get_list_filter(self, request: HttpRequest) -> tuple[Any, ...]:
        return (
            DatabaseFilter,
            StatusFilter,
            DomainFilter,
            TypeFilter,
            ErrorTypeFilter,
            ErrorCodeFilter,
            BatchFilter,
            AttemptsFilter,
            NodeFilter,
            ("created_at", range_filter("sent")),
            ("updated_at", range_filter("changed")),
        )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Command]:
        return Command.objects.using(chosen(request))

    def get_urls(self) -> list[URLPattern]:
        act: Any = self.admin_site.admin_view(self.act_view)
        for using in connections:  # also under ATOMIC_REQUESTS: what a large action has done stays done
            act = transaction.non_atomic_requests(using=using)(act)
        return [path("act/<str:name>/", act, name="commandbus_command_act"), *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        return super().changelist_view(request, {"title": "Commands", **(extra_context or {})})

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        if not self.has_view_permission(request) or request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        domain, _, command_id = object_id.rpartition("/")
        try:
            command = get_command(domain, uuid_of(command_id, "command_id"))
        except CommandBusError:
            command = None
        if command is None:
            raise Http404(f"There is no command {command_id} in domain {domain!r}; it may have been pruned.")
        return TemplateResponse(request, "admin/commandbus/command/command.html", command_page(self, request, command))

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        return self.change_view(request, object_id)  # the timeline

    def act_view(self, request: HttpRequest, name: str) -> HttpResponseBase:
        return acting.act_view(self, request, name)

    # Django asks these for each action that names a permission.

    def has_retry_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "retry_command")

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "cancel_command")

    def has_complete_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "complete_command")

    @admin.action(description="Retry selected commands", permissions=["retry"])
    def retry(self, request: HttpRequest, queryset: QuerySet[Command]) -> HttpResponseBase:
        return acting.ask_about_rows(self, request, "retry", queryset)

    @admin.action(description="Cancel selected commands", permissions=["cancel"])
    def cancel(self, request: HttpRequest, queryset: QuerySet[Command]) -> HttpResponseBase:
        return acting.ask_about_rows(self, request, "cancel", queryset)

    @admin.action(description="Complete selected commands by hand", permissions=["complete"])
    def complete(self, request: HttpRequest, queryset: QuerySet[Command]) -> HttpResponseBase:
        return acting.ask_about_rows(self, request, "complete", queryset)

    @admin.display(description="command")
    def name(self, command: Command) -> SafeString:
        return format_html(
            '{} <span class="quiet">{}</span><br>{}',
            badges.text(command.command_type),
            command.domain,
            badges.code(command.command_id),
        )

    @admin.display(description="status, attempts, last error")
    def state(self, command: Command) -> SafeString:
        """And the attempts, and the last error."""
        return format_html(
            '{} <span class="quiet cb-nowrap">{} of {}</span><br><span class="quiet">{}</span>',
            badges.status(command.status),
            command.attempts,
            command.max_attempts,
            badges.text(command.last_error_code or ""),
        )

    @admin.display(description="sent, changed", ordering="id")
    def sent(self, command: Command) -> SafeString:
        """And how long after that it was changed last."""
        return format_html(
            '{}<br><span class="quiet cb-nowrap">+ {}</span>',
            badges.moment(command.created_at),
            badges.span(command.updated_at - command.created_at),
        )
