from __future__ import annotations

from django.contrib import admin

from commandbus.admin.readonly import ReadOnlyAdmin
from commandbus.models import Node


@admin.register(Node)
class NodeAdmin(ReadOnlyAdmin):
    list_display = ("name", "role", "host", "pid", "version", "started_at", "heartbeat_at", "stopped_at")
    ordering = ("-started_at",)
