from __future__ import annotations

import uuid
from typing import ClassVar

from django.db import models
from django.db.models.functions import Now


class Node(models.Model):
    """A running process. Its name is stable and chosen; its id is new at every start."""

    node_id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    name = models.TextField()
    role = models.TextField()
    domains = models.JSONField(default=list)
    handled_types = models.JSONField(default=dict, help_text="The command types it handles, by domain")
    host = models.TextField()
    pid = models.IntegerField()
    version = models.TextField()
    started_at = models.DateTimeField(db_default=Now())
    heartbeat_at = models.DateTimeField(db_default=Now())
    heartbeat_seconds = models.FloatField(db_default=10.0, help_text="Between two heartbeats")
    heard_since = models.DateTimeField(db_default=Now(), help_text="Since when no heartbeat was missed")
    stop_requested_at = models.DateTimeField(null=True, help_text="When an operator asked it to stop")
    stopped_at = models.DateTimeField(null=True)

    class Meta:
        db_table = "command_bus_node"
        default_permissions = ("view",)
        permissions: ClassVar = [("stop_node", "Can ask nodes to stop")]

    def __str__(self) -> str:
        return self.name
