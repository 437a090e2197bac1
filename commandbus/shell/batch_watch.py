"""One batch, until it has completed: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import deque
from uuid import UUID

from django.core.management.base import OutputWrapper
from django.db import InterfaceError, OperationalError, connections

from commandbus.api import database_of
from commandbus.batches import require_batch
from commandbus.folding import fold_batches
from commandbus.messages import BatchMetadata, BatchStatus
from commandbus.shell.interrupt import held_back
from commandbus.shell.progress import LiveLine
from commandbus.shell.sending import INTERRUPTED
from commandbus.shell.table import age
from commandbus.text import bar, number, plain, plural

LOOK_SECONDS = 0.5
LINE_SECONDS = 10.0
LOOKS = 60
"""So many are remembered for the pace."""


def watch(domain: str, batch_id: UUID, out: OutputWrapper, err: OutputWrapper, *, silent: bool = False) -> int:
    """Answers the exit code: 0 for COMPLETED, 1 for COMPLETED_WITH_FAILURES, 130 after Ctrl-C."""
    view = _View(err, silent=silent)
    try:
        batch = _until_complete(domain, batch_id, view)
    except KeyboardInterrupt:
        view.leave()
        if not silent:
            err.write("interrupted; the batch goes on")
        return INTERRUPTED
    finally:
        view.leave()
    if not silent:
        out.write(f"{batch.status}: {', '.join([plural(batch.total_count, 'command'), *_unwanted(batch)])}")
    if batch.callback_error is not None:
        err.write(f"its on_complete command could not be sent: {plain(batch.callback_error)}")
    return 0 if batch.status is BatchStatus.COMPLETED else 1


def _until_complete(domain: str, batch_id: UUID, view: _View) -> BatchMetadata:
    """Once it was seen, a database that is away is waited for."""
    using = database_of(domain)
    batch = _look(using, domain, batch_id)
    view.show(batch)
    while not batch.is_complete:
        time.sleep(LOOK_SECONDS)
        try:
            batch = _look(using, domain, batch_id)
        except (OperationalError, InterfaceError) as error:
            if not connections[using].in_atomic_block:
                connections[using].close()  # the next look begins anew
            view.say(f"the database is away: {plain(str(error).strip().partition(chr(10))[0])}")
        else:
            view.show(batch)
    return batch


def _look(using: str, domain: str, batch_id: UUID) -> BatchMetadata:
    with held_back():
        fold_batches(using)  # so that it ends where no worker lives any more
        return require_batch(domain, batch_id)


class Pace:
    """How quickly a count grows, over the last looks at it."""

    def __init__(self, looks: int = LOOKS) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=looks)

    def add(self, at: float, count: int) -> None:
        """`at`: in seconds, of any clock."""
        self._seen.append((at, count))

    @property
    def per_second(self) -> float | None:
        if len(self._seen) < 2:
            return None
        (first_at, first), (last_at, last) = self._seen[0], self._seen[-1]
        return max(last - first, 0) / max(last_at - first_at, 0.001)


class _View:
    def __init__(self, err: OutputWrapper, *, silent: bool) -> None:
        self._line = LiveLine(err, silent=silent)
        self._pace = Pace()
        self._said = ""
        self._said_at = -LINE_SECONDS

    def show(self, batch: BatchMetadata) -> None:
        now = time.monotonic()
        self._pace.add(now, batch.ended_count)
        total = _total(batch)
        text = ", ".join([f"{number(batch.ended_count)} of {number(total)} ended", *self._rest(batch)])
        if self._line.live:
            self._line.draw(f"{bar(batch.ended_count / total if total else batch.is_complete)}  {text}")
        elif batch.is_complete or now - self._said_at >= LINE_SECONDS:
            self.say(text)

    def say(self, text: str) -> None:
        if self._line.live:
            self._line.draw(text)
        elif text != self._said:
            self._line.print(text)
            self._said, self._said_at = text, time.monotonic()

    def leave(self) -> None:
        self._line.leave()

    def _rest(self, batch: BatchMetadata) -> list[str]:
        parts = []
        pace = self._pace.per_second
        if pace is not None:
            parts.append(f"{pace:,.1f}/s" if pace < 10 else f"{pace:,.0f}/s")
            if pace and batch.waiting_count:
                parts.append(f"{age(batch.waiting_count / pace)} left")
        parts += _unwanted(batch)
        if batch.is_open:
            parts.append("not sealed")
        elif batch.in_troubleshooting_count and not batch.waiting_count:
            parts.append("the rest waits for an operator")
        return parts


def _total(batch: BatchMetadata) -> int:
    """As many as there will be, as far as that is known."""
    return max(batch.total_count, batch.expected_count or 0) if batch.is_open else batch.total_count


def _unwanted(batch: BatchMetadata) -> list[str]:
    counts = {
        "failed": batch.failed_count,
        "canceled": batch.canceled_count,
        "in troubleshooting": batch.in_troubleshooting_count,
    }
    return [f"{number(count)} {name}" for name, count in counts.items() if count]
