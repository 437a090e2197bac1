from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from commandbus import conf, status
from commandbus.admin.readonly import ReadOnlyAdmin


class OverviewAdmin(ReadOnlyAdmin):
    """Lists what there is in all databases. One that is away hides no other."""

    heading: str
    template: str
    permission: str
    """For what can be done about a row."""

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        seen = status.overview()
        context = self.page(
            request,
            self.heading,
            domains=seen.domains,
            nodes=seen.nodes,
            away=seen.away,
            has_several_databases=conf.current().has_several_databases,
            may_act=self.may(request, self.permission),
        )
        return TemplateResponse(request, self.template, context)
