from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from commandbus import (
    BusinessRuleError,
    Command,
    Context,
    Reply,
    RetryPolicy,
    TransientCommandError,
    command_handler,
    reply_handler,
)

from .models import Account, Entry, Payment

QUICKLY = RetryPolicy(max_attempts=3, backoff=(0.5, 1))


@dataclass(frozen=True)
class Debit:
    account: str
    amount: Decimal
    invoice: str = ""
    bank_is_down_for_attempts: int = 0


@command_handler("payments", "DebitAccount", retry_policy=QUICKLY)
def debit_account(command: Command[Debit], context: Context) -> dict[str, Any]:
    """Runs in a transaction with the end of the command: the account is debited once, whatever crashes when."""
    debit = command.data
    if context.attempt <= debit.bank_is_down_for_attempts:
        raise TransientCommandError("BANK_DOWN", "the bank does not answer")
    account = Account.objects.select_for_update().get(number=debit.account)
    if account.balance < debit.amount:
        raise BusinessRuleError("INSUFFICIENT_FUNDS", f"{account.number} has only {account.balance}")
    account.balance -= debit.amount
    account.save(update_fields=["balance"])
    Entry.objects.create(account=account, command_id=command.command_id, amount=-debit.amount)
    return {"balance": str(account.balance)}


@reply_handler("payments")
def payment_ended(reply: Reply, context: Context) -> None:
    """Also this happens once: the payment learns its outcome in the transaction that ends the reply."""
    Payment.objects.filter(id=reply.command_id).update(
        outcome=reply.outcome, message=reply.error.message if reply.error else None
    )
