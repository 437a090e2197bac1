"""Which database a page shows. Domains may live on several, and nothing joins across them."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.filters import SimpleListFilter
from django.db import connections
from django.db.models import QuerySet
from django.http import HttpRequest

from commandbus import conf, install

PARAMETER = "database"


def databases() -> list[str]:
    return [using for using in install.databases() if connections[using].vendor == "postgresql"]


def chosen(request: HttpRequest) -> str:
    """That of the domain that is asked for, or the one that is asked for, or the first."""
    known = databases()
    if (domain := request.GET.get("domain")) and conf.current().database_of(domain) in known:
        return conf.current().database_of(domain)
    asked = request.GET.get(PARAMETER)
    if asked in known:
        return str(asked)
    return conf.DEFAULT_ALIAS if conf.DEFAULT_ALIAS in known else known[0]


class DatabaseFilter(SimpleListFilter):
    """Shown where there are several."""

    title = "database"
    parameter_name = PARAMETER

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        self.shown = chosen(request)
        known = databases()
        return [(using, using) for using in known] if len(known) > 1 else []

    def choices(self, changelist: Any) -> Any:
        for using, title in self.lookup_choices:
            yield {
                "selected": using == self.shown,
                "query_string": changelist.get_query_string({PARAMETER: using}, ["domain"]),
                "display": title,
            }

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset
