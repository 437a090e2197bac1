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


class Payment(models.Model):
    """What a customer has asked for. Its id is the key that came with the request, and the id of the command."""

    id = models.UUIDField(primary_key=True)
    account = models.TextField()
    amount = models.DecimalField(max_digits=12, decimal_places=2)
    outcome = models.TextField(null=True, help_text="As the reply says; None while there is none")
    message = models.TextField(null=True, help_text="Why it was refused")
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.amount} from {self.account}"
