from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Max
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils import timezone

from commandbus import conf, nodes, search
from commandbus.admin.databases import PARAMETER, chosen
from commandbus.admin.forms import ReasonForm
from commandbus.admin.overview import OverviewAdmin
from commandbus.messages import AuditEvent
from commandbus.models import Audit, Command, Node

SHOWN = 100
ISOLATED = "isolated"
EXPLANATION = (
    "It ends what it runs, gives back the rest, and stops. Its supervisor starts no other in its place; "
    "whatever starts the supervisor may."
)


@admin.register(Node)
class NodeAdmin(OverviewAdmin):
    heading = "Nodes"
    template = "admin/commandbus/node/nodes.html"
    permission = "stop_node"

    def get_urls(self) -> list[URLPattern]:
        stop = self.admin_site.admin_view(self.stop_view)
        return [path("<uuid:node_id>/stop/", stop, name="commandbus_node_stop"), *super().get_urls()]

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        if not self.has_view_permission(request) or request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        using = chosen(request)
        node = self._node(using, object_id)
        wanted = search.Search(running=True, node_ids=(node.node_id,), domains=tuple(node.domains))
        found = search.find(wanted, using, at_most=SHOWN)
        running = list(search.commands_of(found, using, oldest_first=True))
        context = self.page(
            request,
            f"Node {node.name}",
            node=node,
            running=_since(running, using),
            more=found.more,
            silence=timezone.now() - node.heartbeat_at,
            database=using if conf.current().has_several_databases else None,
            may_act=self.may(request, self.permission),
            stop_url=f"{self.url('commandbus_node_stop', node.node_id)}?{PARAMETER}={using}",
        )
        return TemplateResponse(request, "admin/commandbus/node/node.html", context)

    def stop_view(self, request: HttpRequest, node_id: UUID) -> HttpResponseBase:
        """GET asks, POST acts."""
        if not self.has_view_permission(request) or not self.may(request, self.permission):
            raise PermissionDenied
        using = chosen(request)
        node = self._node(using, node_id)
        if node.role == ISOLATED:
            raise Http404("It runs what may have killed a process, and its supervisor starts and stops it as needed.")
        form = ReasonForm(request.POST if request.method == "POST" else None)
        if request.method != "POST" or not form.is_valid():
            return self.ask(request, f"Stop node {node.name}?", EXPLANATION, form)
        reason = form.cleaned_data["reason"] or None
        if nodes.ask_to_stop(using, node.node_id, operator=request.user.get_username(), reason=reason):
            messages.success(request, f"Node {node.name} was asked to stop. It sees that with its next heartbeat.")
        else:
            messages.info(request, f"Node {node.name} was asked before, or has stopped.")
        return HttpResponseRedirect(self.url("commandbus_node_changelist"))

    def _node(self, using: str, node_id: str | UUID) -> Node:
        try:
            return Node.objects.using(using).get(node_id=UUID(str(node_id)))
        except (ValueError, Node.DoesNotExist) as error:
            raise Http404(f"There is no node {node_id} in database {using}.") from error


def _since(running: list[Command], using: str) -> list[tuple[Command, Any]]:
    """Each with the time when it was received."""
    received = (
        Audit.objects.using(using)
        .filter(
            command_id__in=[command.command_id for command in running],
            event_type=AuditEvent.RECEIVED,
            ts__gte=min((command.created_at for command in running), default=timezone.now()),
        )
        .values_list("domain", "command_id")
        .annotate(Max("ts"))
    )
    moments = {(domain, command_id): at for domain, command_id, at in received}
    return [(command, moments.get((command.domain, command.command_id), command.updated_at)) for command in running]
