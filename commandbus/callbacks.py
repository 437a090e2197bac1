"""Functions that are called when a batch has completed. Best effort: they are gone with their process.

One thread looks after the batches of this process that have one, and ends with the last of them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections

from commandbus.folding import fold_batches
from commandbus.messages import BatchMetadata
from commandbus.models import Batch

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0

BatchCallback = Callable[[BatchMetadata], Awaitable[None] | None]

logger = logging.getLogger(__name__)


_waiting: dict[tuple[str, UUID], list[BatchCallback]] = {}
"""By database and batch."""
_lock = threading.Lock()
_thread: threading.Thread | None = None


def call_when_complete(using: str, batch_id: UUID, function: BatchCallback) -> None:
    global _thread
    with _lock:
        functions = _waiting.setdefault((using, batch_id), [])
        if function not in functions:  # whoever opens a batch again says the same again
            functions.append(function)
        if _thread is None:
            thread = threading.Thread(target=_run, name="commandbus-callbacks", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the batch is committed: no error may say otherwise
                logger.exception("no thread could be started for the function of batch %s; the next may", batch_id)
            else:
                _thread = thread


def forget_all() -> None:
    with _lock:
        _waiting.clear()


def _run() -> None:
    pause = FIRST_PAUSE
    while _goes_on():
        time.sleep(pause)
        try:
            pause = FIRST_PAUSE if run_once() else min(2 * pause, LONGEST_PAUSE)
        except Exception:
            logger.exception("the functions of batches wait on after an unexpected error")
            connections.close_all()
            pause = LONGEST_PAUSE


def _goes_on() -> bool:
    global _thread
    with _lock:
        if _waiting:
            return True
        connections.close_all()
        _thread = None  # whoever comes next starts another
        return False


def run_once() -> int:
    """Call the functions of the batches that have completed. Answers how many that were."""
    with _lock:
        waiting = list(_waiting)
    called = 0
    for using in {using for using, _ in waiting}:
        mine = [batch_id for alias, batch_id in waiting if alias == using]
        try:
            if not connections[using].get_autocommit():
                connections[using].set_autocommit(True)
            fold_batches(using)
            batches = Batch.objects.using(using).filter(batch_id__in=mine).as_they_are()
        except (DatabaseError, InterfaceError):
            connections[using].close()
            continue
        for batch in batches:
            for function in _take(using, batch.batch_id) if batch.is_complete else ():
                _call(function, batch)
                called += 1
        for batch_id in set(mine) - {batch.batch_id for batch in batches}:
            _take(using, batch_id)  # it was pruned
    return called


def _take(using: str, batch_id: UUID) -> list[BatchCallback]:
    with _lock:
        return _waiting.pop((using, batch_id), [])


def _call(function: BatchCallback, batch: BatchMetadata) -> None:
    try:
        result = function(batch)
        if inspect.isawaitable(result):
            asyncio.run(_await(result))
    except BaseException:
        logger.exception("the on_complete function of batch %s failed", batch.batch_id)


async def _await(result: Awaitable[None]) -> None:
    await result


def _after_fork() -> None:
    """The functions belong to the parent, and so does the thread."""
    global _lock, _thread
    _lock, _thread = threading.Lock(), None
    _waiting.clear()


os.register_at_fork(after_in_child=_after_fork)
