from __future__ import annotations

from django.db import models


class Account(models.Model):
    number = models.TextField(primary_key=True)
    balance = models.DecimalField(max_digits=12, decimal_places=2)

    def __str__(self) -> str:
        return self.number


class Entry(models.Model):
    """What happened to a balance. One row per command, whatever the number of attempts."""

    account = models.ForeignKey(Account, on_delete=models.CASCADE)
    command_id = models.UUIDField(unique=True)
    amount = models.DecimalField(max_digits=12, decimal_places=2)

    def __str__(self) -> str:
        return f"{self.account_id} {self.amount}"
