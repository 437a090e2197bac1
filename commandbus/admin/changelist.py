"""Lists that read a bounded amount, however long the table is."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR, ChangeList
from django.db.models import QuerySet
from django.http import HttpRequest

BEYOND = "beyond"


class BoundedChangeList(ChangeList):
    """Shows what one look has found, in pages, and leads on to what is beyond it."""

    more = False
    """Whether there may be others than those that are listed."""
    next_beyond: int | None = None
    estimate: int | None = None
    oldest_first = False
    position: str | None = None
    """The field that the list goes along; the primary key, if it says nothing."""

    def __init__(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        parameters = request.GET.copy()
        if any("\0" in value for values in parameters.lists() for value in values[1]):
            raise IncorrectLookupParameters("PostgreSQL knows no text with a NUL")
        self.beyond = _number(parameters.pop(BEYOND, [None])[-1])
        request.GET = parameters  # type: ignore[assignment]  # a new choice starts again at the newest
        super().__init__(request, *args, **kwargs)

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        specs = self.get_filters(request)
        self.filter_specs, self.has_filters, remaining, _, self.has_active_filters = specs
        if remaining:
            raise IncorrectLookupParameters(f"there is no filter called {', '.join(remaining)}")
        self.clear_all_filters_qs = self.get_query_string(remove=list(self.get_filters_params()))
        self.oldest_first = self.get_ordering(request, self.root_queryset)[:1] == [self.position or self.opts.pk.name]
        chosen = [_number(one) for one in request.POST.getlist(ACTION_CHECKBOX_NAME)]
        if chosen and request.POST.get("select_across") == "0":
            # Not those of them that a new look would find: others may have come meanwhile.
            return self.root_queryset.filter(pk__in=chosen).order_by("-pk")
        return self.look(request)

    def look(self, request: HttpRequest) -> QuerySet[Any]:
        """Set what there is beyond, and answer what was found."""
        raise NotImplementedError

    def get_query_string(self, new_params: Any = None, remove: Any = None) -> str:
        if self.beyond is not None and PAGE_VAR in (new_params or {}):
            new_params = {**new_params, BEYOND: self.beyond}
        return super().get_query_string(new_params, remove)

    @property
    def onward(self) -> str | None:
        """The query string of the next look."""
        return None if self.next_beyond is None else self.get_query_string({BEYOND: self.next_beyond})


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 18:
        raise IncorrectLookupParameters(f"{text!r:.100} is not a row of the list")
    return int(text)
