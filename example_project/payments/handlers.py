from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any

from commandbus import (
    BusinessRuleError,
    Command,
    Context,
    PermanentCommandError,
    RetryPolicy,
    TransientCommandError,
    command_handler,
)
from example_project.payments.models import Account, Entry

QUICKLY = RetryPolicy(max_attempts=3, backoff=(0.5, 1))


@command_handler("payments", "DebitAccount", retry_policy=QUICKLY)
def debit_account(command: Command, context: Context) -> dict[str, Any]:
    """Runs in a transaction with the end of the command: the account is debited once, whatever crashes when."""
    try:
        amount = Decimal(command.data["amount"])
    except (KeyError, TypeError, InvalidOperation):
        raise PermanentCommandError("BAD_AMOUNT", f"amount is {command.data.get('amount')!r}, not a number") from None
    if context.attempt <= command.data.get("bank_is_down_for_attempts", 0):
        raise TransientCommandError("BANK_DOWN", "the bank does not answer")
    account = Account.objects.select_for_update().get(number=command.data["account"])
    if account.balance < amount:
        raise BusinessRuleError("INSUFFICIENT_FUNDS", f"{account.number} has {account.balance}, {amount} are needed")
    account.balance -= amount
    account.save(update_fields=["balance"])
    Entry.objects.create(account=account, command_id=command.command_id, amount=-amount)
    return {"balance": str(account.balance)}
