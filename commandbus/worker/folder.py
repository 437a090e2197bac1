"""Adds up what was counted in batches, in a thread of its own: a lease must not wait for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from django.db import DatabaseError, InterfaceError, OperationalError, connections

from commandbus.exceptions import CommandBusError
from commandbus.folding import fold_batches
from commandbus.models import BatchDelta
from commandbus.worker.log import log, logger

FOLD_SECONDS = 1.0
TRIES_AT_END, PAUSE_AT_END = 5, 0.05


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


def fold_rest(using: str, domains: Iterable[str]) -> bool:
    """For a worker that has nothing else to do: fold what was counted in batches of its domains.

    Answers whether something has changed, for a batch that has completed may have sent more. What cannot be folded is
    left to others: somebody has locked it.
    """
    unfolded = BatchDelta.objects.using(using)
    try:
        batches = unfolded.batches_in(domains)
        if not batches:
            return False
        for _ in range(TRIES_AT_END):
            fold_batches(using)
            if unfolded.batches_in(domains) != batches:
                return True
            time.sleep(PAUSE_AT_END)  # somebody else is folding
        log(logging.WARNING, "fold.postponed", database=using, batches=len(batches))
    except (OperationalError, InterfaceError) as error:
        log(logging.WARNING, "fold.postponed", database=using, error=str(error).strip())
        connections[using].close()
        time.sleep(FOLD_SECONDS)
        return True
    return False
