from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from commandbus import conf
from commandbus.admin import badges
from commandbus.admin.changelist import BoundedChangeList
from commandbus.admin.databases import PARAMETER, DatabaseFilter, chosen
from commandbus.admin.pretty import pretty
from commandbus.admin.readonly import ReadOnlyAdmin
from commandbus.masking import masked
from commandbus.models import UnreadableMessage
from commandbus.pgmq import PgmqClient

AT_MOST = 1000


class UnreadableChangeList(BoundedChangeList):
    def look(self, request: HttpRequest) -> QuerySet[UnreadableMessage]:
        messages = self.root_queryset
        if self.beyond is not None:
            messages = messages.filter(id__gt=self.beyond) if self.oldest_first else messages.filter(id__lt=self.beyond)
        messages = messages.order_by("id" if self.oldest_first else "-id")
        rows = list(messages.values_list("id", flat=True)[: AT_MOST + 1])
        self.more = len(rows) > AT_MOST
        self.next_beyond = rows[AT_MOST - 1] if self.more else None
        return messages.filter(id__in=rows[:AT_MOST])

    def url_for_result(self, result: Any) -> str:
        return f"{super().url_for_result(result)}?{urlencode({PARAMETER: result._state.db})}"


@admin.register(UnreadableMessage)
class UnreadableMessageAdmin(ReadOnlyAdmin):
    list_display = ("seen", "message", "why")
    list_display_links = ("seen",)
    ordering = ("-id",)
    sortable_by = ("seen",)
    fields = ("domain", "queue_name", "msg_id", "reason", "seen_at", "body")
    readonly_fields = ("body",)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[BoundedChangeList]:
        return UnreadableChangeList

    def get_list_filter(self, request: HttpRequest) -> tuple[Any, ...]:
        return (DatabaseFilter,)

    def get_queryset(self, request: HttpRequest) -> QuerySet[UnreadableMessage]:
        return UnreadableMessage.objects.using(chosen(request))

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        return super().changelist_view(request, {"title": "Unreadable messages", **(extra_context or {})})

    @admin.display(description="seen", ordering="id")
    def seen(self, message: UnreadableMessage) -> SafeString:
        return badges.moment(message.seen_at)

    @admin.display(description="message")
    def message(self, message: UnreadableMessage) -> str:
        return str(message)

    @admin.display(description="reason")
    def why(self, message: UnreadableMessage) -> SafeString:
        return badges.text(message.reason)

    @admin.display(description="message")
    def body(self, message: UnreadableMessage) -> SafeString:
        """As PGMQ's archive has it."""
        using = message._state.db or conf.DEFAULT_ALIAS
        found = PgmqClient(using).archived(message.queue_name, message.msg_id)
        return format_html('<pre class="cb-json">{}</pre>', pretty(masked(found, conf.current().mask)).text)
