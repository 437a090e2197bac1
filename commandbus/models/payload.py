from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models.functions import Now


class PayloadArchive(models.Model):
    """Payloads kept apart from PGMQ's archive, where COMMANDBUS["PAYLOAD_ARCHIVE"] asks for it."""

    domain = models.TextField()
    command_id = models.UUIDField()
    payload_json = models.JSONField()
    archived_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "command_bus_payload_archive"
        default_permissions = ()
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["domain", "command_id"], name="uq_command_bus_payload_archive")
        ]

    def __str__(self) -> str:
        return f"{self.domain}/{self.command_id}"


class UnreadableMessage(models.Model):
    """A message in a command queue that belongs to no command. Its body is in PGMQ's archive under `msg_id`."""

    domain = models.TextField()
    queue_name = models.TextField()
    msg_id = models.BigIntegerField()
    reason = models.TextField()
    seen_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "command_bus_unreadable_message"
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.queue_name}/{self.msg_id}"
