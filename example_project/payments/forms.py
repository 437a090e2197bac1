from decimal import Decimal

from django import forms


class PaymentForm(forms.Form):
    """`key` is the idempotency key: a form that is sent twice, by a double click, pays once."""

    key = forms.UUIDField(widget=forms.HiddenInput)
    account = forms.CharField(max_length=34)
    amount = forms.DecimalField(min_value=Decimal("0.01"), max_digits=12, decimal_places=2)
