"""What a list of commands can be narrowed to. The choices come from registries: commands may be too many to ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from django.contrib.admin.filters import SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.db.models import QuerySet
from django.http import HttpRequest

from commandbus import install, nodes, search
from commandbus.admin.databases import chosen
from commandbus.messages import Status
from commandbus.models import Batch, Domain, Node
from commandbus.search import Search

MOST_NODES = 1000
STARTS = 1000
"""Of a node, the latest: each has an id of its own."""


class SearchFilter(SimpleListFilter):
    """Narrows the search instead of a queryset, which could read the whole table."""

    def has_output(self) -> bool:
        return bool(self.lookup_choices) or self.value() is not None

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, name) for name in self.names(request)]

    def names(self, request: HttpRequest) -> Sequence[str]:
        raise NotImplementedError

    def narrow(self, request: HttpRequest, wanted: Search) -> Search:
        value = self.value()
        return wanted if value is None else self.narrow_to(request, wanted, value)

    def narrow_to(self, request: HttpRequest, wanted: Search, value: str) -> Search:
        raise NotImplementedError


class DomainFilter(SearchFilter):
    title = "domain"
    parameter_name = "domain"

    def names(self, request: HttpRequest) -> Sequence[str]:
        here = Domain.objects.using(chosen(request)).values_list("name", flat=True)
        return sorted({*here, *install.domains()})

    def narrow_to(self, request: HttpRequest, wanted: Search, value: str) -> Search:
        return replace(wanted, domains=(value,))


class StatusFilter(SearchFilter):
    title = "status"
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(status.value, label_of(status.value)) for status in Status]

    def narrow_to(self, request: HttpRequest, wanted: Search, value: str) -> Search:
        if value == Status.IN_PROGRESS:
            return replace(wanted, running=True)  # also where MARK_IN_PROGRESS is off
        try:
            return replace(wanted, status=Status(value))
        except ValueError as error:
            raise IncorrectLookupParameters(error) from error


class TypeFilter(SearchFilter):
    title = "type"
    parameter_name = "type"

    def names(self, request: HttpRequest) -> Sequence[str]:
        domain = request.GET.get("domain")
        return search.command_types(chosen(request), (domain,) if domain else ())

    def narrow_to(self, request: HttpRequest, wanted: Search, value: str) -> Search:
        return replace(wanted, command_types=(value,))


class ErrorFilter(SearchFilter):
    """An empty value asks for those without."""

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        none = [""] if request.GET.get(self.parameter_name or "") == "" else []
        return [(name, name or "none") for name in [*none, *self.names(request)]]


class ErrorTypeFilter(ErrorFilter):
    title = "error type"
    parameter_name = "error_type"

    def names(self, request: HttpRequest) -> Sequence[str]:
        return search.error_types(chosen(request))

    def narrow_to(self, request: HttpRequest, wanted: Search, value: str) -> Search:
        return replace(wanted, error_types=(value,))


class ErrorCodeFilter(ErrorFilter):
    """For links from groups; there may be very many codes to choose from."""

    title = "error code"
    parameter_name = "error_code"

    def names(self, request: HttpRequest) -> Sequence[str]:
        code = request.GET.get(self.parameter_name)
        return [code] if code else []

    def narrow_to(self, request: HttpRequest, wanted: Search, value: str) -> Search:
        return replace(wanted, error_codes=(value,))


class BatchFilter(SearchFilter):
    """For links from batches; there are too many to choose from."""

    title = "batch"
    parameter_name = "batch"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        value = request.GET.get(self.parameter_name or "")
        if value is None:
            return []
        try:
            self.batch_id = UUID(value)
        except ValueError as error:
            raise IncorrectLookupParameters(error) from error
        self.batch = Batch.objects.using(chosen(request)).filter(batch_id=self.batch_id).first()
        return [(value, str(self.batch or self.batch_id))]

    def narrow_to(self, request: HttpRequest, wanted: Search, value: str) -> Search:
        return replace(wanted, batch_id=self.batch_id)


class AttemptsFilter(SearchFilter):
    title = "attempts"
    parameter_name = "attempts"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(str(least), f"{least} or more") for least in (2, 3, 5, 10)]

    def narrow_to(self, request: HttpRequest, wanted: Search, value: str) -> Search:
        if not value.isdecimal() or len(value) > 6:
            raise IncorrectLookupParameters(f"{value!r} is not a number of attempts")
        return replace(wanted, least_attempts=int(value))


class NodeFilter(SearchFilter):
    title = "node"
    parameter_name = "node"

    def names(self, request: HttpRequest) -> Sequence[str]:
        latest = Node.objects.using(chosen(request)).order_by("-started_at").values_list("name", flat=True)
        return sorted(set(latest[:MOST_NODES]))

    def narrow_to(self, request: HttpRequest, wanted: Search, value: str) -> Search:
        starts = list(Node.objects.using(chosen(request)).filter(name=value).order_by("-started_at")[:STARTS])
        if not starts:
            return replace(wanted, node_ids=(search.NO_NODE,))
        # No index has the nodes, but none has run what was sent long after its last heartbeat.
        limits = [wanted.created_until, max(node.heartbeat_at for node in starts) + nodes.LIVING]
        until = min(limit for limit in limits if limit is not None)
        return replace(wanted, node_ids=tuple(node.node_id for node in starts), created_until=until)


def label_of(name: str) -> str:
    """As people read it: IN_TROUBLESHOOTING_QUEUE is "In troubleshooting queue"."""
    return name.replace("_", " ").capitalize()
