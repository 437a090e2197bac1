"""Adds up what was counted in batches, in a thread of its own: a lease must not wait for it."""

from __future__ import annotations

import logging
import threading
import time

from django.db import DatabaseError, InterfaceError, connections

from commandbus.exceptions import CommandBusError
from commandbus.folding import fold_batches
from commandbus.models import BatchDelta
from commandbus.worker.log import log, logger

FOLD_SECONDS = 1.0
TRIES_AT_END = 5


class Folder(threading.Thread):
    def __init__(self, using: str) -> None:
        super().__init__(name=f"commandbus-fold-{using}", daemon=True)
        self.using = using
        self._wake = threading.Event()
        self._stopping = threading.Event()

    def fold_soon(self) -> None:
        """There is nothing else to do, so that a batch may just have ended."""
        self._wake.set()

    def stop(self) -> None:
        """Fold once more, then end."""
        self._stopping.set()
        self._wake.set()

    def run(self) -> None:
        pause = FOLD_SECONDS
        try:
            while not self._stopping.is_set():
                self._wake.wait(pause)
                self._wake.clear()
                started_at = time.monotonic()
                self._try()
                pause = max(FOLD_SECONDS, time.monotonic() - started_at)  # at most half of the time
        finally:
            self._try()
            connections[self.using].close()

    def _try(self) -> None:
        try:
            fold_batches(self.using)
        except (DatabaseError, InterfaceError, CommandBusError) as error:
            log(logging.WARNING, "fold.postponed", database=self.using, error=str(error).strip())
            connections[self.using].close()
        except Exception:  # noqa: BLE001 - without this thread no batch would complete
            logger.exception("the folder goes on after an unexpected error")


def fold_rest(using: str) -> bool:
    """For a worker that has nothing else to do. Answers whether there was something, for that may have sent more."""
    try:
        if not BatchDelta.objects.using(using).exists():
            return False
        for _ in range(TRIES_AT_END):
            fold_batches(using)
            if not BatchDelta.objects.using(using).exists():
                break
            time.sleep(0.05)  # somebody else is folding, or has locked a batch
    except (DatabaseError, InterfaceError) as error:
        log(logging.WARNING, "fold.postponed", database=using, error=str(error).strip())
        connections[using].close()
    return True
