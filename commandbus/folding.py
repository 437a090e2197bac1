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
CALLS_BESIDE = 3
"""Of somebody who has something else to do."""

logger = logging.getLogger("commandbus.batches")


def fold_batches(using: str, most_calls: int = MOST_CALLS) -> int:
    """Add up what was counted in one database, and complete what has ended. Answers how many it completed.

    If a transaction is open, on another connection: what is folded must be committed at once, or nobody else can fold.
    """
    connection = connections[using]
    if not is_in_transaction(connection):
        return fold_on(connection, most_calls)
    own = connection.copy()
    own.settings_dict["AUTOCOMMIT"] = True
    try:
        return fold_on(own, most_calls)
    finally:
        own.close()


def fold_on(connection: BaseDatabaseWrapper, most_calls: int = MOST_CALLS) -> int:
    """In as many calls as it takes, each of which commits by itself; no more than `most_calls`."""
    completed: list[dict[str, Any]] = []
    after: str | None = None
    for _ in range(most_calls):
        with connection.cursor() as cursor:
            cursor.execute("SELECT completed, postponed, next_after FROM commandbus.fold_batches(%s)", [after])
            done, postponed, after = cursor.fetchone()
        completed += _told(json.loads(done))
        for batch in json.loads(postponed):
            named = batch["domain"], batch["batch_id"]
            logger.error("batch.postponed domain=%s batch_id=%s error=%s", *named, batch["error"])
        if after is None:
            break
    return len(completed)


def fold_after_commit(using: str) -> None:
    """Now, if no transaction is open. (Where transactions are managed by hand, workers will do it.)"""
    if transaction.get_autocommit(using) or connections[using].in_atomic_block:
        transaction.on_commit(partial(fold_batches, using, CALLS_BESIDE), using=using, robust=True)


def _told(completed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for batch in completed:
        named = batch["domain"], batch["batch_id"]
        logger.info("batch.completed domain=%s batch_id=%s status=%s", *named, batch["status"])
        if batch["callback_error"] is not None:
            logger.error("batch.callback_failed domain=%s batch_id=%s error=%s", *named, batch["callback_error"])
    return completed
