from __future__ import annotations

from django.db import models


class Report(models.Model):
    command_id = models.UUIDField(primary_key=True)
    month = models.TextField()

    def __str__(self) -> str:
        return self.month
