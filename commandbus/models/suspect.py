from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class Suspect(models.Model):
    """A command that waits for an isolated run, because it may have killed the process that held it."""

    id = models.BigIntegerField(primary_key=True, help_text="That of the command's row")
    domain = models.TextField()
    command_id = models.UUIDField()
    msg_id = models.BigIntegerField()
    since = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "command_bus_suspect"
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.domain} {self.command_id}"
