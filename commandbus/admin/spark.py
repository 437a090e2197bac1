from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import admin
from django.contrib.admin.filters import SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import quote, unquote
from django.contrib.postgres.expressions import ArraySubquery
from django.core.exceptions import PermissionDenied
from django.db.models import Case, F, Func, IntegerField, JSONField, OuterRef, QuerySet, Subquery, When
from django.db.models.functions import Left
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from commandbus import conf, search
from commandbus.admin import badges
from commandbus.admin.changelist import BoundedChangeList
from commandbus.admin.databases import PARAMETER, DatabaseFilter, chosen
from commandbus.admin.filters import DomainFilter, label_of
from commandbus.admin.pretty import pretty
from commandbus.admin.progress import rate_text
from commandbus.admin.readonly import ReadOnlyAdmin
from commandbus.masking import masked
from commandbus.messages import storable
from commandbus.models import Batch, SparkJob, SparkReject
from commandbus.models.spark import ALL, COMPLETED, FAILED, RUNNING
from commandbus.text import plural

TONES = {RUNNING: "running", COMPLETED: "good", FAILED: "bad"}
MOST_COUNTED = 1000
"""Rows that were set aside, of a job that has not counted them itself."""
SHOWN = 50
"""Of these rows, on the page of a job."""
MOST_BYTES = 50_000
"""Of a row's data that are read: they are masked as a whole, before they are cut."""
MOST_CHARACTERS = 5_000
"""Of a row's data that are shown."""


class JobNow(Func):
    function = "commandbus.spark_job_now"
    output_field = JSONField()


@dataclass(frozen=True, kw_only=True)
class Counts:
    """None is what nobody knows: a DataFrame is counted when it was sent."""

    rows: int | None
    sent: int
    duplicate: int | None
    rejected: str
    rate: str | None
    """Of the rows, since this run began. A stream has no such rate: it waits for what comes."""


class SparkStatusFilter(SimpleListFilter):
    title = "status"
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(status, label_of(status)) for status in ALL]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset


class SparkChangeList(BoundedChangeList):
    position = "started_at"

    def look(self, request: HttpRequest) -> QuerySet[SparkJob]:
        """The one index has the times, so what is asked for is chosen from the jobs next to each other there."""
        domain, status = request.GET.get("domain") or None, request.GET.get("status") or None
        if status and status not in ALL:
            raise IncorrectLookupParameters(f"there is no status {status!r}")
        way = "" if self.oldest_first else "-"
        jobs = self.root_queryset.order_by(f"{way}started_at")
        if self.beyond is not None:
            jobs = jobs.filter(**{f"started_at__{'gte' if self.oldest_first else 'lte'}": _moment(self.beyond)})
        most = search.LOOK_THROUGH if domain or status else search.AT_MOST
        rows = list(jobs.values_list("job_id", "started_at", "domain", "status")[: most + 1])
        next_at = rows[most][1] if len(rows) > most else None
        found = [row for row in rows[:most] if domain in (None, row[2]) and status in (None, row[3])]
        if len(found) > search.AT_MOST:
            next_at = found[search.AT_MOST][1]
        if next_at is not None:
            self.more, self.next_beyond = True, _number(next_at)
        shown = {row[0]: row[1] for row in found[: search.AT_MOST]}
        chosen_jobs = self.root_queryset.filter(job_id__in=list(shown))
        if shown:  # or PostgreSQL may rather read all there are than look up so many
            chosen_jobs = chosen_jobs.filter(started_at__range=(min(shown.values()), max(shown.values())))
        return as_they_are(chosen_jobs).order_by(f"{way}started_at", "job_id")

    def url_for_result(self, result: Any) -> str:
        address = self.model_admin.url("commandbus_sparkjob_change", quote(result.job_id))  # type: ignore[attr-defined]
        return f"{address}?{urlencode({PARAMETER: result._state.db})}"


@admin.register(SparkJob)
class SparkJobAdmin(ReadOnlyAdmin):
    list_display = ("job", "state", "counts", "times")
    list_display_links = ("job",)
    ordering = ("-started_at",)
    sortable_by = ("times",)
    actions = None

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[BoundedChangeList]:
        return SparkChangeList

    def get_list_filter(self, request: HttpRequest) -> tuple[Any, ...]:
        return (DatabaseFilter, SparkStatusFilter, DomainFilter)

    def get_queryset(self, request: HttpRequest) -> QuerySet[SparkJob]:
        return SparkJob.objects.using(chosen(request))

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        return super().changelist_view(request, {"title": "Spark jobs", **(extra_context or {})})

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        if not self.has_view_permission(request) or request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        using, mask, job_id = chosen(request), conf.current().mask, unquote(object_id)
        job = None if "\0" in job_id else as_they_are(self.get_queryset(request).filter(job_id=job_id)).first()
        if job is None:
            raise Http404(f"There is no Spark job {job_id!r} in database {using}; it may have been pruned.")
        context = self.page(
            request,
            f"Spark job {job.job_id}",
            job=job,
            badge=badge(job.status),
            counts=counts_of(job),
            database=using if conf.current().has_several_databases else None,
            lasted=(job.ended_at or timezone.now()) - job.started_at,
            error=masked(job.error or "", mask),
            batch=Batch.objects.using(using).filter(pk=job.batch_id).first() if job.batch_id else None,
            batch_url=self.url_of_batch(job.domain, job.batch_id) if job.batch_id else "",
            set_aside=set_aside(job, using, mask),
        )
        return TemplateResponse(request, "admin/commandbus/sparkjob/job.html", context)

    @admin.display(description="job")
    def job(self, job: SparkJob) -> SafeString:
        return format_html('{}<br><span class="quiet">{}</span>', badges.text(job.job_id), job.domain)

    @admin.display(description="status, progress")
    def state(self, job: SparkJob) -> SafeString:
        notes = [f"run {job.run:,}"] if job.run > 1 else []
        if job.stream_run is not None:
            notes.append("stream" if job.stream_batch is None else f"stream, micro-batch {job.stream_batch:,}")
        if job.status == RUNNING:
            seen = counts_of(job)
            notes.append(f"{plural(seen.rows or 0, 'row')} so far" + (f", {seen.rate}" if seen.rate else ""))
        lines = format_html_join("", '<br><span class="quiet">{}</span>', [(note,) for note in notes])
        return format_html("{}{}", badge(job.status), lines)

    @admin.display(description="sent, duplicate, rejected")
    def counts(self, job: Any) -> SafeString:
        seen = counts_of(job)
        duplicate = "–" if seen.duplicate is None else f"{seen.duplicate:,}"
        numbers = (f"{seen.sent:,} sent", f"{duplicate} duplicate", f"{seen.rejected} rejected")
        parts = zip(("good", "quiet", "quiet" if seen.rejected == "0" else "bad"), numbers, strict=True)
        counted = format_html_join(" ", '<span class="cb-count cb-{}">{}</span>', parts)
        if job.batch_id is None:
            return counted
        url, name = self.url_of_batch(job.domain, job.batch_id), badges.text(job.batch_name or str(job.batch_id))
        return format_html("{}<br>batch {}", counted, format_html('<a href="{}">{}</a>', url, name) if url else name)

    @admin.display(description="started", ordering="started_at")
    def times(self, job: SparkJob) -> SafeString:
        """And how long it took, or has taken so far."""
        began = badges.moment(job.started_at)
        lasted = badges.span((job.ended_at or timezone.now()) - job.started_at)
        if job.ended_at is None:
            return format_html('running since {}<br><span class="quiet">{} so far</span>', began, lasted)
        return format_html('{}<br><span class="quiet">took {}</span>', began, lasted)


def as_they_are(jobs: QuerySet[SparkJob]) -> QuerySet[Any]:
    """With what is not folded yet, the rows that were set aside by those that have not counted them, and the batch."""
    aside = (
        SparkReject.objects.filter(job_id=OuterRef("job_id"), run=OuterRef("run")).order_by("digest").values("digest")
    )
    counted = Func(ArraySubquery(aside[: MOST_COUNTED + 1]), function="cardinality", output_field=IntegerField())
    name = Batch.objects.filter(batch_id=OuterRef("batch_id")).values("name")[:1]
    return jobs.annotate(
        now=JobNow(F("job_id")),
        aside=Case(When(status=COMPLETED, then=None), default=counted),
        batch_name=Subquery(name),
    )


def counts_of(job: Any) -> Counts:
    """Of a job with what `as_they_are` adds."""
    is_stream = job.stream_run is not None
    rows = job.now["row_count"] + job.now["handled_rows"]
    seconds = (timezone.now() - job.started_at).total_seconds()
    has_rate = job.status == RUNNING and not is_stream and rows and seconds > 0
    aside = job.aside or 0
    rejected = max(job.rejected_count, min(aside, MOST_COUNTED))
    return Counts(
        rows=None if job.status == FAILED and not is_stream else rows,
        sent=job.now["sent_count"],
        duplicate=job.now["duplicate_count"] if job.status == COMPLETED or is_stream else None,
        rejected=f"{rejected:,}{'+' if aside > MOST_COUNTED else ''}",
        rate=rate_text(rows / seconds) if has_rate else None,
    )


def set_aside(job: SparkJob, using: str, mask: Iterable[str]) -> list[tuple[str | None, ...]]:
    """Id, type, reason, and data or why not, of some of the rows that were set aside, without secrets."""
    # In the order of the one index they have: there may be millions.
    rejects = SparkReject.objects.using(using).filter(job_id=job.job_id, run=job.run).order_by("digest")
    size = Func(F("data"), function="octet_length", output_field=IntegerField())
    texts = (Left("command_id", 100), Left("command_type", 300), Left("reason", 1000))
    rows = rejects.annotate(size=size).values_list(*texts, "size", Case(When(size__lte=MOST_BYTES, then=F("data"))))
    return [(*masked(list(row[:3]), mask), *_shown(row[3], row[4], mask)) for row in rows[:SHOWN]]


def _shown(size: int | None, data: str | None, mask: Iterable[str]) -> tuple[str | None, str]:
    """A row's data, or why not."""
    if data is None:
        return None, "none" if size is None else f"{size:,} bytes, too many to be shown"
    try:
        # Half a surrogate pair is one of the reasons to set a row aside, and no page can hold it.
        return storable(pretty(masked(json.loads(data), mask)).text, MOST_CHARACTERS), ""
    except (ValueError, RecursionError):  # what is no JSON cannot be masked
        return None, f"not JSON, {len(data):,} characters"


def badge(status: str) -> SafeString:
    return format_html('<span class="cb-badge cb-{}">{}</span>', TONES[status], label_of(status))


def _number(moment: datetime) -> int:
    """Of microseconds since 1970."""
    return round(moment.timestamp() * 1_000_000)


def _moment(number: int) -> datetime:
    try:
        return datetime.fromtimestamp(number / 1_000_000, UTC if settings.USE_TZ else None)
    except (ValueError, OverflowError) as error:
        raise IncorrectLookupParameters(error) from error
