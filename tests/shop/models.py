"""A business table of the tests: what handlers write into."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    number = models.TextField()

    def __str__(self) -> str:
        return self.number
