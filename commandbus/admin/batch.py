from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import admin
from django.contrib.admin.filters import SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.db.models import F, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from commandbus import search
from commandbus.admin import badges, batch_acting, progress
from commandbus.admin.batch_page import batch_page
from commandbus.admin.changelist import BoundedChangeList
from commandbus.admin.databases import DatabaseFilter, chosen
from commandbus.admin.dates import range_filter
from commandbus.admin.filters import DomainFilter, label_of
from commandbus.admin.readonly import ReadOnlyAdmin
from commandbus.batches import get_batch
from commandbus.exceptions import CommandBusError
from commandbus.messages import BatchMetadata, BatchStatus
from commandbus.models import Batch
from commandbus.models.batch import BatchNow


class BatchStatusFilter(SimpleListFilter):
    title = "status"
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(status.value, label_of(status.value)) for status in BatchStatus]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset

    def status(self) -> BatchStatus | None:
        try:
            return None if self.value() is None else BatchStatus(str(self.value()))
        except ValueError as error:
            raise IncorrectLookupParameters(error) from error


class BatchChangeList(BoundedChangeList):
    position = "created_at"

    def look(self, request: HttpRequest) -> QuerySet[Batch]:
        using = chosen(request)
        limits = [spec.limits(request) for spec in self.filter_specs if hasattr(spec, "limits")]
        statuses = [spec.status() for spec in self.filter_specs if isinstance(spec, BatchStatusFilter)]
        since, until = limits[0] if limits else (None, None)
        wanted = search.BatchSearch(
            text=self.query,
            domain=request.GET.get("domain"),
            status=statuses[0] if statuses else None,
            created_from=since,
            created_until=until,
        )
        ids, found = search.find_batches(wanted, using, beyond=self.beyond, oldest_first=self.oldest_first)
        self.more, self.next_beyond = found.more, found.beyond
        order = ("created_at", "batch_id") if self.oldest_first else ("-created_at", "-batch_id")
        batches = Batch.objects.using(using).filter(batch_id__in=ids).order_by(*order)
        return batches.only("batch_id").annotate(now=BatchNow(F("batch_id")))

    def get_results(self, request: HttpRequest) -> None:
        """Their counts come with the rows of the page that is shown, and are of one moment."""
        super().get_results(request)
        self.result_list = list(self.result_list)
        for row in self.result_list:
            row.seen = BatchMetadata.from_json(row.now)

    def url_for_result(self, result: Any) -> str:
        return str(self.model_admin.url_of_batch(result.seen.domain, result.batch_id))  # type: ignore[attr-defined]


@admin.register(Batch)
class BatchAdmin(ReadOnlyAdmin):
    list_display = ("batch", "state", "times")
    list_display_links = ("batch",)
    search_fields = ("batch_id",)  # only that there is a search box; see commandbus.search
    search_help_text = "A batch id or its beginning, or the beginning of a name"
    ordering = ("-created_at",)
    sortable_by = ("times",)
    actions = None

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[BoundedChangeList]:
        return BatchChangeList

    def get_list_filter(self, request: HttpRequest) -> tuple[Any, ...]:
        return (DatabaseFilter, BatchStatusFilter, DomainFilter, ("created_at", range_filter("created")))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Batch]:
        return Batch.objects.using(chosen(request))

    def get_urls(self) -> list[URLPattern]:
        act: Any = self.admin_site.admin_view(self.act_view)
        for using in connections:  # also under ATOMIC_REQUESTS: what a large action has done stays done
            act = transaction.non_atomic_requests(using=using)(act)
        address = "<str:domain>/<uuid:batch_id>/act/<str:name>/"
        return [path(address, act, name="commandbus_batch_act"), *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        return super().changelist_view(request, {"title": "Batches", **(extra_context or {})})

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        if not self.has_view_permission(request) or request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        domain, _, batch_id = object_id.rpartition("/")
        try:
            batch = get_batch(domain, UUID(batch_id))
        except (CommandBusError, ValueError):
            batch = None
        if batch is None:
            raise Http404(f"There is no batch {batch_id} in domain {domain!r}; it may have been pruned.")
        return TemplateResponse(request, "admin/commandbus/batch/batch.html", batch_page(self, request, batch))

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        return self.change_view(request, object_id)  # the timeline

    def act_view(self, request: HttpRequest, domain: str, batch_id: UUID, name: str) -> HttpResponseBase:
        return batch_acting.act_view(self, request, domain, batch_id, name)

    @admin.display(description="batch")
    def batch(self, row: Any) -> SafeString:
        batch: BatchMetadata = row.seen
        return format_html(
            '{} <span class="quiet">{}</span><br>{}',
            badges.text(batch.name or "without a name"),
            batch.domain,
            badges.code(batch.batch_id),
        )

    @admin.display(description="status, progress")
    def state(self, row: Any) -> SafeString:
        """And what is unusual about it."""
        batch: BatchMetadata = row.seen
        more = [name for name, is_so in (("canceled", batch.canceled_at), ("open", batch.is_open)) if is_so]
        more += ["callback not sent"] if batch.callback_error else []
        shown = format_html_join(" ", "{}", [(badges.status(name),) for name in (batch.status, *more)])
        return format_html("{}{}{}", shown, progress.bar(batch), progress.legend(batch))

    @admin.display(description="created, started", ordering="created_at")
    def times(self, row: Any) -> SafeString:
        """And how long it took, or has taken so far."""
        batch: BatchMetadata = row.seen
        lasted = progress.pace(batch, timezone.now()).lasted
        if batch.started_at is None or lasted is None:
            started = "not started"
        else:
            started = f"+ {badges.span(batch.started_at - batch.created_at)}, "
            started += f"took {badges.span(lasted)}" if batch.is_complete else f"{badges.span(lasted)} so far"
        return format_html('{}<br><span class="quiet">{}</span>', badges.moment(batch.created_at), started)
