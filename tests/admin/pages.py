"""What the tests of the pages share."""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

from django.contrib.auth.models import Group, User
from django.test import Client
from django.urls import reverse

from commandbus.messages import ErrorInfo, Failure
from commandbus.transitions import PostgresTransitions
from tests.helpers import reload, send

BUS = PostgresTransitions("default")


def troubled(command_type: str = "PlaceOrder", code: str = "NEVER", kind: str = "Broken", **data: Any) -> UUID:
    """A command that waits for an operator."""
    command_id = send(command_type, **data)
    [received] = BUS.receive("orders", qty=1, vt=30)
    BUS.fail("orders", [Failure(received.lease, ErrorInfo(kind, code, f"{code}: it cannot work"))])
    return command_id


def client_of(group: str | None, name: str = "kim") -> Client:
    """Somebody of the staff, in a group or in none."""
    user = User.objects.create_user(name, password="secret", is_staff=True)
    if group is not None:
        user.groups.add(Group.objects.get(name=group))
    client = Client()
    client.force_login(user)
    return client


def url(name: str, *args: object) -> str:
    return reverse(f"admin:commandbus_{name}", args=args)


def page_of(command_id: UUID, domain: str = "orders") -> str:
    return url("command_change", f"{domain}/{command_id}")


def get(client: Client, page: str, query: dict[str, Any] | None = None) -> str:
    response = client.get(page, query or {})
    assert response.status_code == 200, response
    return response.content.decode()


def post(client: Client, page: str, fields: dict[str, Any]) -> str:
    """The page that one is led to."""
    response = client.post(page, fields, follow=True)
    assert response.status_code == 200, response
    return response.content.decode()


def row(command_id: UUID, domain: str = "orders") -> str:
    """As a confirmation page hands it on."""
    return f"{domain}/{command_id}/{reload(command_id, domain).msg_id}"


def text_of(html: str) -> str:
    """Without tags, with single spaces."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))
