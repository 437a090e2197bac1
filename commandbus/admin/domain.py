from __future__ import annotations

from django.contrib import admin

from commandbus.admin.readonly import ReadOnlyAdmin
from commandbus.models import Domain


@admin.register(Domain)
class DomainAdmin(ReadOnlyAdmin):
    list_display = ("name", "paused", "reply_queue", "max_attempts", "created_at")
