from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django import forms

from commandbus.encoding import json_object, parse_exactly
from commandbus.exceptions import CommandBusError
from commandbus.masking import MASK, unmasked


class JSONObjectField(forms.CharField):
    """A JSON object as text; what is wrong with it is said with line and column."""

    empty_values = (None, "")  # an object may be empty
    widget = forms.Textarea(attrs={"rows": 16, "class": "vLargeTextField cb-json-input", "spellcheck": "false"})

    def __init__(self, **options: Any) -> None:
        super().__init__(strip=True, **options)

    def to_python(self, value: Any) -> Any:
        text = super().to_python(value)
        if not text:
            return None
        try:
            read = parse_exactly(text)
            if not isinstance(read, dict):
                raise forms.ValidationError('It must be a JSON object, such as {"amount": 5}.')
            json_object(read, "this")
        except CommandBusError as error:
            raise forms.ValidationError(str(error)) from error
        return read


class ReasonForm(forms.Form):
    reason = forms.CharField(
        required=False,
        max_length=1000,
        widget=forms.Textarea(attrs={"rows": 2, "class": "vLargeTextField"}),
        help_text="For the audit.",
    )


class CancelForm(ReasonForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["reason"].required = True
        self.fields["reason"].help_text = "For the audit. Whoever sent the command gets it with the reply."


class CancelBatchForm(CancelForm):
    troubleshooting = forms.BooleanField(
        required=False,
        label="Also cancel those in the Troubleshooting Queue",
        help_text="Else they wait for an operator, and the batch with them.",
    )
    field_order = ("troubleshooting", "reason")


class SealForm(forms.Form):
    """Asks for more only if the batch has another number of commands than was expected."""

    def __init__(self, *args: Any, total: int, expected: int | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if expected not in (None, total):
            self.fields["allow_incomplete"] = forms.BooleanField(
                label="Seal it as it is",
                help_text=f"{expected:,} commands were expected, and it has {total:,}.",
            )


class CompleteForm(ReasonForm):
    result = JSONObjectField(
        required=False,
        help_text="A JSON object that whoever sent the command gets as the data of the reply; empty for none.",
    )
    field_order = ("result", "reason")


class EditForm(ReasonForm):
    payload = JSONObjectField(
        label="Data", help_text="What the command shall be sent again with. The data before stay in the audit."
    )
    field_order = ("payload", "reason")

    def __init__(self, *args: Any, before: Any, mask: Sequence[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.before, self.mask = before, mask
        if mask:
            hidden = f"A value {MASK} is hidden from you and stays as it is, unless you write another in its place."
            self.fields["payload"].help_text = f"{self.fields['payload'].help_text} {hidden}"

    def clean_payload(self) -> Any:
        try:
            return unmasked(self.cleaned_data["payload"], self.before, self.mask)
        except CommandBusError as error:
            raise forms.ValidationError(str(error)) from error
