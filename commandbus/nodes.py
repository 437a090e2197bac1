"""The registry of running processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from uuid import UUID

from django.db import connections
from django.db.models.functions import Now

import commandbus
from commandbus.messages import storable
from commandbus.models import Node

HEARTBEAT_SECONDS = 10.0
LIVING = timedelta(minutes=1)


def register(
    using: str,
    *,
    node_id: UUID,
    name: str,
    role: str,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    domains: Sequence[str],
    handled_types: Mapping[str, Sequence[str]],
) -> None:
    """Make a process known under an id of its own. To repeat it does no harm."""
    node = Node(
        node_id=node_id,
        name=name,
        role=role,
        heartbeat_seconds=heartbeat_seconds,
        domains=list(domains),
        handled_types={domain: list(types) for domain, types in handled_types.items()},
        host=socket.gethostname(),
        pid=os.getpid(),
        version=commandbus.__version__,
    )
    Node.objects.using(using).bulk_create([node], ignore_conflicts=True)


def heartbeat(using: str, node_id: UUID) -> bool:
    """Answers whether an operator has asked the node to stop."""
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT commandbus.heartbeat(%s)", [node_id])
        return bool(cursor.fetchone()[0])


def ask_to_stop(using: str, node_id: UUID, *, operator: str | None = None, reason: str | None = None) -> bool:
    """Let a node end what it runs, give back the rest, and stop. Its supervisor does not replace it.

    Answers whether it was asked: False for one that has stopped or was asked before.
    """
    texts = [None if text is None else storable(text) for text in (operator, reason)]
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT commandbus.stop_node(%s, %s, %s)", [node_id, *texts])
        return bool(cursor.fetchone()[0])


def types_handled_elsewhere(using: str, domain: str, node_id: UUID) -> set[str]:
    """The command types that other living nodes handle."""
    living = Node.objects.using(using).filter(stopped_at=None, heartbeat_at__gt=Now() - LIVING).exclude(node_id=node_id)
    return {name for types in living.values_list("handled_types", flat=True) for name in types.get(domain, ())}


def stopped(using: str, node_id: UUID) -> None:
    Node.objects.using(using).filter(node_id=node_id).update(heartbeat_at=Now(), stopped_at=Now())
