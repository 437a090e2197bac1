from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q


class Tombstone(models.Model):
    """What stays of a pruned command: its id is taken, by this content, for ever.

    Written by `commandbus.prune_commands` in the transaction that removes the command, read by `commandbus.send`. There
    is one row for every command that ever was, so it has no key of its own and no index that nobody asks for.
    """

    pk = models.CompositePrimaryKey("domain", "command_id")
    domain = models.TextField()
    command_id = models.UUIDField()
    content_hash = models.BinaryField(max_length=32)
    unique_globally = models.BooleanField()
    pruned_at = models.DateTimeField()

    class Meta:
        db_table = "command_bus_tombstone"
        default_permissions = ()
        indexes: ClassVar = [
            models.Index(
                fields=["command_id"], name="ix_command_bus_tombstone_cmdid", condition=Q(unique_globally=True)
            )
        ]

    def __str__(self) -> str:
        return f"{self.domain}/{self.command_id}"
