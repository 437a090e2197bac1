"""Adding up what was counted in batches. Workers do it all the time; so does whoever waits for a batch."""

from __future__ import annotations

import json
import logging
from functools import partial
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from commandbus.api import is_in_transaction

MOST_CALLS = 1000

logger = logging.getLogger(__name__)


def fold_batches(using: str) -> int:
    """Add up what was counted in one database, and complete what has ended. Answers how many it completed.

    If a transaction is open, on another connection: what is folded must be committed at once, or nobody else can fold.
    """
    connection = connections[using]
    if not is_in_transaction(connection):
        return fold_on(connection)
    own = connection.copy()
    own.settings_dict["AUTOCOMMIT"] = True
    try:
        return fold_on(own)
    finally:
        own.close()


def fold_on(connection: BaseDatabaseWrapper) -> int:
    """In as many calls as it takes, each of which commits by itself."""
    completed: list[dict[str, Any]] = []
    after: str | None = None
    for _ in range(MOST_CALLS):
        with connection.cursor() as cursor:
            cursor.execute("SELECT completed, next_after FROM commandbus.fold_batches(%s)", [after])
            done, after = cursor.fetchone()
        completed += _told(json.loads(done))
        if after is None:
            break
    return len(completed)


def fold_after_commit(using: str) -> None:
    """Now, if no transaction is open. (Where transactions are managed by hand, workers will do it.)"""
    if transaction.get_autocommit(using) or connections[using].in_atomic_block:
        transaction.on_commit(partial(fold_batches, using), using=using, robust=True)


def _told(completed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for batch in completed:
        named = batch["domain"], batch["batch_id"]
        logger.info("batch.completed domain=%s batch_id=%s status=%s", *named, batch["status"])
        if batch["callback_error"] is not None:
            logger.error("batch.callback_failed domain=%s batch_id=%s error=%s", *named, batch["callback_error"])
    return completed
