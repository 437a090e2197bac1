from __future__ import annotations

from django.contrib import admin

from commandbus.admin.readonly import ReadOnlyAdmin
from commandbus.models import Command


@admin.register(Command)
class CommandAdmin(ReadOnlyAdmin):
    list_display = ("command_id", "domain", "command_type", "status", "attempts", "max_attempts", "updated_at")
    list_filter = ("domain", "status")
    search_fields = ("=command_id", "=command_type")
    ordering = ("-id",)
    exclude = ("content_hash",)
