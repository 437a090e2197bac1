"""Ranges of time, by django-admin-rangefilter where it is installed and by Django's own choices where it is not."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.conf import settings
from django.contrib.admin.filters import DateFieldListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.http import HttpRequest
from django.utils import timezone
from django.utils.dateparse import parse_datetime

if TYPE_CHECKING:
    from django.contrib.admin.filters import FieldListFilter

Limits = tuple[datetime | None, datetime | None]
"""From and until. Whether the last instant counts does not matter."""


def range_filter(title: str) -> type[FieldListFilter]:
    """A filter with `limits(request)`."""
    if not apps.is_installed("rangefilter"):
        return type("DateChoices", (DateChoices,), {"heading": title})
    from rangefilter.filters import DateTimeRangeQuickSelectListFilterBuilder

    return type("DateTimeRange", (RangeLimits, DateTimeRangeQuickSelectListFilterBuilder(title=title)), {})


class RangeLimits:
    """Of django-admin-rangefilter's filter."""

    form: Any
    field_path: str
    used_parameters: dict[str, Any]
    _make_query_filter: Any

    def get_form(self, request: HttpRequest) -> Any:
        """A date without a time is the whole day."""
        for comparison, time in (("gte", "00:00:00"), ("lte", "23:59:59")):
            name = f"{self.field_path}__range__{comparison}"
            if _last(self.used_parameters.get(f"{name}_0")) and not _last(self.used_parameters.get(f"{name}_1")):
                self.used_parameters[f"{name}_1"] = time
        return super().get_form(request)  # type: ignore[misc]

    def limits(self, request: HttpRequest) -> Limits:
        if not self.form.is_bound or not self.form.is_valid():
            return None, None
        chosen = self._make_query_filter(request, self.form.cleaned_data)
        return chosen.get(f"{self.field_path}__gte"), chosen.get(f"{self.field_path}__lte")


class DateChoices(DateFieldListFilter):
    heading = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.title = self.heading

    def limits(self, request: HttpRequest) -> Limits:
        return self._moment(self.lookup_kwarg_since), self._moment(self.lookup_kwarg_until)

    def _moment(self, name: str) -> datetime | None:
        value = self.used_parameters.get(name)
        if value is None:
            return None
        try:
            moment = parse_datetime(str(_last(value)))
        except ValueError as error:
            raise IncorrectLookupParameters(error) from error
        if moment is None:
            raise IncorrectLookupParameters(f"{value!r} is not a time")
        return timezone.make_aware(moment) if settings.USE_TZ and timezone.is_naive(moment) else moment


def _last(value: Any) -> Any:
    """Of a parameter, which Django gives as a list of all values."""
    return value[-1] if isinstance(value, list) else value
