from __future__ import annotations

import json
from decimal import Decimal
from uuid import UUID, uuid4

from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from commandbus import DuplicateCommandError, audit_trail, get_command, send_command

from .forms import PaymentForm
from .handlers import Debit
from .models import Payment


@transaction.atomic
def accept(key: UUID, account: str, amount: Decimal) -> UUID:
    """The payment and its command, or neither: both belong to the same transaction."""
    Payment.objects.get_or_create(id=key, defaults={"account": account, "amount": amount})
    return send_command("payments", "DebitAccount", key, Debit(account, amount))


def pay(request: HttpRequest) -> HttpResponse:
    """A form for people."""
    form = PaymentForm(request.POST or None, initial={"key": uuid4(), "account": "DE-1"})
    if request.method == "POST" and form.is_valid():
        try:
            return redirect("payment", accept(**form.cleaned_data))
        except DuplicateCommandError:
            form.add_error(None, "This form was sent before, with another content. Load the page again.")
    payments = Payment.objects.order_by("-created_at")[:20]
    return render(request, "payments/pay.html", {"form": form, "payments": payments})


@csrf_exempt  # for programs, which have no cookie that somebody could abuse
@require_POST
def pay_by_program(request: HttpRequest) -> JsonResponse:
    """JSON for programs: `{"account": "DE-1", "amount": "10.00"}`, with a UUID in the header Idempotency-Key."""
    try:
        body = json.loads(request.body)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return JsonResponse({"error": "the body must be a JSON object"}, status=400)
    form = PaymentForm({**body, "key": request.headers.get("Idempotency-Key")})
    if not form.is_valid():
        return JsonResponse({"errors": form.errors}, status=400)
    try:
        return JsonResponse({"command_id": accept(**form.cleaned_data)}, status=202)
    except DuplicateCommandError as error:
        return JsonResponse({"error": str(error)}, status=409)


def payment(request: HttpRequest, key: UUID) -> HttpResponse:
    """What became of it. The page loads itself again until there is a reply."""
    context = {
        "payment": get_object_or_404(Payment, id=key),
        "command": get_command("payments", key),
        "steps": audit_trail("payments", key),
    }
    return render(request, "payments/payment.html", context)
