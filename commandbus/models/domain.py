from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now


class Domain(models.Model):
    """A domain and those settings of it that the SQL functions need. Written by `commandbus.register_domain`."""

    name = models.TextField(primary_key=True)
    metadata = models.JSONField(db_default={})
    paused = models.BooleanField(db_default=False)
    queue_name = models.TextField()
    replies = models.BooleanField(
        db_default=False, help_text="It stands for the reply queue of its name, which has handlers"
    )
    reply_queue = models.TextField(null=True)
    max_attempts = models.IntegerField()
    mark_in_progress = models.BooleanField()
    unique_globally = models.BooleanField()
    reset_attempts = models.BooleanField()
    archive_payloads = models.BooleanField()
    max_payload_bytes = models.IntegerField()
    crash_limit = models.IntegerField()
    unknown_type_grace = models.FloatField(help_text="seconds")
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "command_bus_domain"
        default_permissions = ("view",)
        permissions: ClassVar = [("pause_domain", "Can pause and resume domains")]
        constraints: ClassVar = [
            models.CheckConstraint(
                condition=Q(
                    max_attempts__gte=1, max_payload_bytes__gte=1, crash_limit__gte=1, unknown_type_grace__gte=0
                ),
                name="ck_command_bus_domain_limits",
            )
        ]

    def __str__(self) -> str:
        return self.name


class CommandType(models.Model):
    """The registry of command types: for senders without the handlers, and for choices in lists."""

    domain = models.TextField()
    command_type = models.TextField()
    max_attempts = models.IntegerField(null=True, help_text="None if no handler of it was ever seen")
    unhandled_since = models.DateTimeField(null=True, help_text="When a worker first found that nobody handles it")

    class Meta:
        db_table = "command_bus_command_type"
        default_permissions = ()
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["domain", "command_type"], name="uq_command_bus_command_type"),
            models.CheckConstraint(condition=Q(max_attempts__gte=1), name="ck_command_bus_command_type_attempts"),
        ]

    def __str__(self) -> str:
        return f"{self.domain}/{self.command_type}"
