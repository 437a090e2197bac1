from __future__ import annotations

from uuid import uuid4

import pytest
from django.test import Client
from django.urls import reverse

from commandbus import send_command
from commandbus.models import Command, Domain

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("model", ["command", "audit", "domain", "node"])
def test_every_list_can_be_looked_at_and_nothing_can_be_added(admin_client: Client, model: str) -> None:
    command_id = send_command("orders", "PlaceOrder", uuid4(), {})
    page = admin_client.get(
        reverse(f"admin:commandbus_{model}_changelist"), {"q": str(command_id)} if model in ("command", "audit") else {}
    )
    assert page.status_code == 200
    if model in ("command", "audit"):
        assert str(command_id) in page.content.decode()
    assert admin_client.get(reverse(f"admin:commandbus_{model}_add")).status_code == 403


def test_nobody_edits_a_status_by_hand(admin_client: Client) -> None:
    send_command("orders", "PlaceOrder", uuid4(), {})
    command = Command.objects.get()
    url = reverse("admin:commandbus_command_change", args=[command.pk])
    assert admin_client.get(url).status_code == 200
    assert admin_client.post(url, {"status": "COMPLETED"}).status_code == 403
    assert admin_client.post(reverse("admin:commandbus_command_delete", args=[command.pk])).status_code == 403
    assert Command.objects.get().status == "PENDING"
    assert Domain.objects.exists()
