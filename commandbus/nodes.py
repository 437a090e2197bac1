"""The registry of running processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from uuid import UUID

from django.db.models.functions import Now

import commandbus
from commandbus.models import Node

HEARTBEAT_SECONDS = 10.0


def register(
    using: str,
    *,
    node_id: UUID,
    name: str,
    role: str,
    domains: Sequence[str],
    handled_types: Mapping[str, Sequence[str]],
) -> None:
    """Make a process known under an id of its own."""
    Node.objects.using(using).create(
        node_id=node_id,
        name=name,
        role=role,
        domains=list(domains),
        handled_types={domain: list(types) for domain, types in handled_types.items()},
        host=socket.gethostname(),
        pid=os.getpid(),
        version=commandbus.__version__,
    )


def heartbeat(using: str, node_id: UUID) -> None:
    Node.objects.using(using).filter(node_id=node_id).update(heartbeat_at=Now())


def stopped(using: str, node_id: UUID) -> None:
    Node.objects.using(using).filter(node_id=node_id).update(heartbeat_at=Now(), stopped_at=Now())
