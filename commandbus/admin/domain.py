from __future__ import annotations

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponseBase, HttpResponseRedirect
from django.urls import URLPattern, path

from commandbus import conf
from commandbus.admin.forms import ReasonForm
from commandbus.admin.overview import OverviewAdmin
from commandbus.api import pause_domain, resume_domain
from commandbus.models import Domain

CHANGES = {"pause": pause_domain, "resume": resume_domain}
EXPLANATIONS = {
    "pause": "Workers receive nothing more of this domain. What runs goes on, and commands can still be sent.",
    "resume": "Workers receive what waits in this domain again.",
}


@admin.register(Domain)
class DomainAdmin(OverviewAdmin):
    heading = "Domains"
    template = "admin/commandbus/domain/domains.html"
    permission = "pause_domain"

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Domain | None:
        if "\0" in object_id:
            return None
        return Domain.objects.using(conf.current().database_of(object_id)).filter(name=object_id).first()

    def get_urls(self) -> list[URLPattern]:
        change = self.admin_site.admin_view(self.pause_view)
        return [path("<str:name>/<str:change>/", change, name="commandbus_domain_pause"), *super().get_urls()]

    def pause_view(self, request: HttpRequest, name: str, change: str) -> HttpResponseBase:
        """GET asks, POST acts."""
        if change not in CHANGES:
            return self.change_view(request, name)
        if not self.has_view_permission(request) or not self.may(request, self.permission):
            raise PermissionDenied
        if self.get_object(request, name) is None:
            raise Http404(f"There is no domain {name!r}.")
        form = ReasonForm(request.POST if request.method == "POST" else None)
        if request.method != "POST" or not form.is_valid():
            return self.ask(request, f"{change.capitalize()} {name}?", EXPLANATIONS[change], form)
        reason = form.cleaned_data["reason"] or None
        changed = CHANGES[change](name, operator=request.user.get_username(), reason=reason)
        if changed:
            messages.success(request, f"The domain {name} was {change}d.")
        else:
            messages.info(request, f"The domain {name} was {change}d already.")
        return HttpResponseRedirect(self.url("commandbus_domain_changelist"))
