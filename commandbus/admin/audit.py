from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.filters import SimpleListFilter
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from commandbus import conf, search
from commandbus.admin import badges
from commandbus.admin.changelist import BoundedChangeList
from commandbus.admin.databases import DatabaseFilter, chosen
from commandbus.admin.dates import range_filter
from commandbus.admin.filters import DomainFilter, label_of
from commandbus.admin.pretty import pretty
from commandbus.admin.readonly import ReadOnlyAdmin
from commandbus.masking import masked
from commandbus.messages import AuditEvent
from commandbus.models import Audit


class EventFilter(SimpleListFilter):
    title = "event"
    parameter_name = "event"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(event.value, label_of(event.value)) for event in AuditEvent]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset


class AuditChangeList(BoundedChangeList):
    def look(self, request: HttpRequest) -> QuerySet[Audit]:
        limits = [spec.limits(request) for spec in self.filter_specs if hasattr(spec, "limits")]
        since, until = limits[0] if limits else (None, None)
        events, found = search.find_audit(
            chosen(request),
            text=self.query,
            domain=request.GET.get("domain"),
            event_type=request.GET.get("event"),
            since=since,
            until=until,
            beyond=self.beyond,
            oldest_first=self.oldest_first,
        )
        self.more, self.next_beyond = found.more, found.beyond
        return events


@admin.register(Audit)
class AuditAdmin(ReadOnlyAdmin):
    list_display = ("at", "event", "about")
    list_display_links = None
    search_fields = ("command_id",)  # only that there is a search box; see commandbus.search
    search_help_text = "A command id, a batch id, or the name of an operator"
    ordering = ("-audit_id",)
    sortable_by = ("at",)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[BoundedChangeList]:
        return AuditChangeList

    def get_list_filter(self, request: HttpRequest) -> tuple[Any, ...]:
        return (DatabaseFilter, EventFilter, DomainFilter, ("ts", range_filter("time")))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Audit]:
        return Audit.objects.using(chosen(request))

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        return super().changelist_view(request, {"title": "Audit events", **(extra_context or {})})

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        raise Http404("A row of the audit has no page of its own.")

    @admin.display(description="time", ordering="audit_id")
    def at(self, event: Audit) -> SafeString:
        return badges.moment(event.ts)

    @admin.display(description="event")
    def event(self, event: Audit) -> SafeString:
        return format_html('{}<br><span class="quiet">{}</span>', label_of(event.event_type), event.domain)

    @admin.display(description="about")
    def about(self, event: Audit) -> SafeString:
        details = event.details_json if isinstance(event.details_json, dict) else {}
        parts = [self._command(event), self._batch(event), _operator(details), _rest(details)]
        return format_html_join("", "<div>{}</div>", [(part,) for part in parts if part])

    def _command(self, event: Audit) -> SafeString | None:
        if event.command_id is None:
            return None
        url = self.url_of(event.domain, event.command_id)
        name = badges.code(event.command_id)
        return format_html('<a href="{}">{}</a>', url, name) if url else name

    def _batch(self, event: Audit) -> SafeString | None:
        if event.batch_id is None or event.command_id is not None:  # a command's page leads to its batch
            return None
        url = self.url_of_batch(event.domain, event.batch_id)
        name = badges.code(event.batch_id)
        linked = format_html('<a href="{}">{}</a>', url, name) if url else name
        return format_html('<span class="quiet">batch</span> {}', linked)


def _operator(details: dict[str, Any]) -> SafeString | None:
    name = details.get("operator")
    return format_html('<span class="quiet">operator</span> {}', badges.text(str(name))) if name else None


def _rest(details: dict[str, Any]) -> SafeString | None:
    rest = {name: value for name, value in details.items() if name != "operator" and value is not None}
    if not rest:
        return None
    error = rest.get("error")
    summary = str(error.get("code") or "error") if isinstance(error, dict) else ", ".join(rest)
    return format_html(
        '<details class="cb-details"><summary>{}</summary><pre class="cb-json">{}</pre></details>',
        badges.text(summary),
        pretty(masked(rest, conf.current().mask)).text,
    )
