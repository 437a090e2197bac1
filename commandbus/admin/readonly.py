from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from commandbus.admin.databases import chosen
from commandbus.admin.forms import ReasonForm
from commandbus.models import Batch, Command

if TYPE_CHECKING:
    Base = admin.ModelAdmin[Any]
else:
    Base = admin.ModelAdmin


class ReadOnlyAdmin(Base):
    """Nobody edits the bus's rows by hand: statuses change through transitions only."""

    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # a count of every choice

    class Media:
        css = {"all": ("commandbus/admin.css",)}  # noqa: RUF012 - Django's way

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """A list of a database that is away leads back to the start, and says so."""
        try:
            return super().changelist_view(request, extra_context)
        except (InterfaceError, OperationalError) as error:
            messages.error(request, f"The database {chosen(request)} gave no answer: {str(error).strip()}")
            return HttpResponseRedirect(reverse("admin:index", current_app=self.admin_site.name))

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def may(self, request: HttpRequest, permission: str) -> bool:
        return bool(getattr(request.user, "has_perm", lambda _: False)(f"commandbus.{permission}"))

    def url(self, name: str, *args: object) -> str:
        """Of a page of this admin site."""
        return reverse(f"admin:{name}", args=args, current_app=self.admin_site.name)

    @property
    def has_commands(self) -> bool:
        """Whether this admin site has the pages of commands: it need not have all of ours."""
        return self.admin_site.is_registered(Command)

    def url_of(self, domain: str, command_id: object) -> str:
        """The page of a command, if this site has it. A log line says enough to make it."""
        return self.url("commandbus_command_change", f"{domain}/{command_id}") if self.has_commands else ""

    def url_of_batch(self, domain: str, batch_id: object) -> str:
        """So with the page of a batch."""
        has_batches = self.admin_site.is_registered(Batch)
        return self.url("commandbus_batch_change", f"{domain}/{batch_id}") if has_batches else ""

    def ask(self, request: HttpRequest, question: str, explanation: str, form: ReasonForm) -> TemplateResponse:
        """The page before an action on one row: nothing is done yet."""
        back = self.url(f"{self.opts.app_label}_{self.opts.model_name}_changelist")
        context = self.page(request, question, explanation=explanation, form=form, back=back)
        return TemplateResponse(request, "admin/commandbus/confirm.html", context)

    def page(self, request: HttpRequest, title: str, **context: Any) -> dict[str, Any]:
        """The context of a page that Django's admin has no view for."""
        request.current_app = self.admin_site.name  # templates make URLs of it
        return {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": title,
            "media": self.media,
            "has_view_permission": True,
            **context,
        }
