from __future__ import annotations

from django.contrib import admin

from commandbus.admin.readonly import ReadOnlyAdmin
from commandbus.models import Audit


@admin.register(Audit)
class AuditAdmin(ReadOnlyAdmin):
    list_display = ("ts", "event_type", "domain", "command_id", "details_json")
    search_fields = ("=command_id",)
    ordering = ("-audit_id",)
