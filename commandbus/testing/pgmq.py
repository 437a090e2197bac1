from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from typing import Any

from commandbus.pgmq.client import Message, QueueMetrics
from commandbus.testing.clock import Clock


@dataclass
class _Queue:
    messages: dict[int, Message]
    archive: dict[int, Message]


class FakePgmqClient:
    """PGMQ in memory, with visibility timeouts on a clock that tests move. Same methods as PgmqClient."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self._queues: dict[str, _Queue] = {}
        self._ids = count(1)

    def create_queue(self, queue: str) -> None:
        self._queues.setdefault(queue, _Queue({}, {}))

    def drop_queue(self, queue: str) -> None:
        self._queues.pop(queue, None)

    def list_queues(self) -> list[str]:
        return sorted(self._queues)

    def send(self, queue: str, message: Mapping[str, Any], *, delay: float = 0) -> int:
        return self.send_batch(queue, [message], delay=delay)[0]

    def send_batch(self, queue: str, messages: Sequence[Mapping[str, Any]], *, delay: float = 0) -> list[int]:
        ids = []
        for body in messages:
            msg_id = next(self._ids)
            now = self.clock.now
            self._queues[queue].messages[msg_id] = Message(
                msg_id, 0, now, now + timedelta(seconds=delay), copy.deepcopy(body)
            )
            ids.append(msg_id)
        return ids

    def read(self, queue: str, *, vt: int = 30, qty: int = 1) -> list[Message]:
        messages = self._queues[queue].messages
        ready = [message for message in messages.values() if message.vt <= self.clock.now][:qty]
        for message in ready:
            until = self.clock.now + timedelta(seconds=vt)
            messages[message.msg_id] = replace(message, read_ct=message.read_ct + 1, vt=until)
        return [messages[message.msg_id] for message in ready]

    def delete(self, queue: str, msg_ids: Sequence[int]) -> list[int]:
        messages = self._queues[queue].messages
        return [msg_id for msg_id in msg_ids if messages.pop(msg_id, None) is not None]

    def archive(self, queue: str, msg_ids: Sequence[int]) -> list[int]:
        found = [msg_id for msg_id in msg_ids if msg_id in self._queues[queue].messages]
        for msg_id in found:
            self._queues[queue].archive[msg_id] = self._queues[queue].messages.pop(msg_id)
        return found

    def set_vt(self, queue: str, msg_ids: Sequence[int], seconds: float) -> list[int]:
        messages = self._queues[queue].messages
        found = [msg_id for msg_id in msg_ids if msg_id in messages]
        for msg_id in found:
            messages[msg_id] = replace(messages[msg_id], vt=self.clock.now + timedelta(seconds=seconds))
        return found

    def purge(self, queue: str) -> int:
        purged = len(self._queues[queue].messages)
        self._queues[queue].messages.clear()
        return purged

    def metrics(self, queue: str) -> QueueMetrics:
        messages = self._queues[queue].messages.values()
        ages = [int((self.clock.now - message.enqueued_at).total_seconds()) for message in messages]
        visible = sum(message.vt <= self.clock.now for message in messages)
        return QueueMetrics(queue, len(ages), visible, max(ages, default=None))

    def archived(self, queue: str, msg_id: int) -> Any | None:
        message = self._queues[queue].archive.get(msg_id)
        return None if message is None else message.message

    def shift_visibility(self, queue: str, by: timedelta) -> None:
        messages = self._queues[queue].messages
        for msg_id, message in messages.items():
            messages[msg_id] = replace(message, vt=message.vt - by)
