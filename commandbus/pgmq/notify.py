"""Wake-ups. A notification carries no data and may be lost: polling always stays on."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections, transaction

from commandbus import conf

logger = logging.getLogger(__name__)

NOBODY_IDLE_SECONDS = 0.05
"""How long a sender may remember that nobody was idle. A worker that becomes idle looks once more after this time."""

_nobody_idle_until: dict[tuple[str, str], float] = {}


def channel(domain: str) -> str:
    """That all workers of the domain listen on."""
    return f"commandbus.{domain}"


def channel_of_node(node_id: UUID) -> str:
    """That one worker listens on: with the domain's, all would wake up for one command."""
    return f"commandbus.node.{node_id}"


def wakes_itself(using: str) -> bool:
    """Whether a send commits by itself, so that it can wake a worker in the same round trip."""
    return conf.current().notify == "after_commit" and transaction.get_autocommit(using)


def notify_sent(domain: str, using: str) -> None:
    """Arrange that an idle worker learns of what this transaction has sent."""
    mode = conf.current().notify
    if mode == "in_transaction":
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, '')", [channel(domain)])
    elif mode == "after_commit" and (transaction.get_autocommit(using) or connections[using].in_atomic_block):
        # (A caller that manages transactions by hand has no commit that Django knows of: polling finds the command.)
        transaction.on_commit(partial(wake, domain, using), using=using, robust=True)


def wake(domain: str, using: str) -> bool:
    """Wake one idle worker, if there is one. Never raises: the command is safe, and polling finds it."""
    key = (using, domain)
    if time.monotonic() < _nobody_idle_until.get(key, 0):
        return False
    try:
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT commandbus.wake(%s)", [domain])
            woken = bool(cursor.fetchone()[0])
    except (DatabaseError, InterfaceError) as error:
        logger.warning("wake.failed domain=%s error=%s", domain, error)
        return False
    if not woken:
        _nobody_idle_until[key] = time.monotonic() + NOBODY_IDLE_SECONDS
    return woken


def set_idle(domains: Sequence[str], node_id: UUID, using: str) -> None:
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT commandbus.set_idle(%s::text[], %s)", [list(domains), node_id])


def clear_idle(node_id: UUID, using: str) -> None:
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT commandbus.clear_idle(%s)", [node_id])
