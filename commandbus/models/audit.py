from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now


class Audit(models.Model):
    """Append-only: what happened to a command or a batch, partitioned by month of `ts`."""

    audit_id = models.BigAutoField(primary_key=True)
    domain = models.TextField()
    command_id = models.UUIDField(null=True)
    batch_id = models.UUIDField(null=True)
    event_type = models.TextField()
    ts = models.DateTimeField(db_default=Now())
    details_json = models.JSONField(null=True)

    class Meta:
        db_table = "command_bus_audit"
        default_permissions = ("view",)
        verbose_name = "audit event"
        indexes: ClassVar = [
            models.Index(fields=["command_id", "ts"], name="ix_command_bus_audit_cmdid_ts"),
            models.Index(
                fields=["batch_id", "ts"],
                name="ix_command_bus_audit_batch",
                condition=Q(batch_id__isnull=False, command_id=None),
            ),
            # What every command has is not in it, so that the usual path does not write it.
            models.Index(
                fields=["event_type", "audit_id"],
                name="ix_command_bus_audit_event",
                condition=~Q(event_type__in=["SENT", "RECEIVED", "COMPLETED"]),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.event_type} {self.command_id or self.batch_id or self.domain}"
