"""PGMQ's functions as methods, on a Django database connection and in its transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connections
from psycopg import sql

from commandbus.conf import DEFAULT_ALIAS


@dataclass(frozen=True, slots=True)
class Message:
    msg_id: int
    read_ct: int
    enqueued_at: datetime
    vt: datetime
    message: Any


@dataclass(frozen=True, slots=True)
class QueueMetrics:
    queue_name: str
    queue_length: int
    queue_visible_length: int
    oldest_msg_age_sec: int | None


class PgmqClient:
    """Columns are read by name: their order differs between PGMQ's versions."""

    def __init__(self, using: str = DEFAULT_ALIAS) -> None:
        self.using = using

    def create_queue(self, queue: str) -> None:
        self._rows("SELECT pgmq.create(%s)", [queue])

    def drop_queue(self, queue: str) -> None:
        self._rows("SELECT pgmq.drop_queue(%s)", [queue])

    def list_queues(self) -> list[str]:
        return [str(row[0]) for row in self._rows("SELECT queue_name FROM pgmq.list_queues() ORDER BY queue_name")]

    def send(self, queue: str, message: Mapping[str, Any], *, delay: float = 0) -> int:
        return self.send_batch(queue, [message], delay=delay)[0]

    def send_batch(self, queue: str, messages: Sequence[Mapping[str, Any]], *, delay: float = 0) -> list[int]:
        if not messages:
            return []
        rows = self._rows(
            "SELECT pgmq.send_batch(%s, %s::jsonb[], clock_timestamp() + make_interval(secs => %s))",
            [queue, [json.dumps(message) for message in messages], delay],
        )
        return [int(row[0]) for row in rows]

    def read(self, queue: str, *, vt: int = 30, qty: int = 1) -> list[Message]:
        rows = self._rows(
            "SELECT msg_id, read_ct, enqueued_at, vt, message FROM pgmq.read(%s, %s, %s) ORDER BY msg_id",
            [queue, vt, qty],
        )
        return [_message(row) for row in rows]

    def delete(self, queue: str, msg_ids: Sequence[int]) -> list[int]:
        return self._ids("SELECT pgmq.delete(%s, %s::bigint[])", queue, msg_ids)

    def archive(self, queue: str, msg_ids: Sequence[int]) -> list[int]:
        return self._ids("SELECT pgmq.archive(%s, %s::bigint[])", queue, msg_ids)

    def set_vt(self, queue: str, msg_ids: Sequence[int], seconds: float) -> list[int]:
        rows = self._rows(
            "SELECT msg_id FROM pgmq.set_vt(%s, %s::bigint[], clock_timestamp() + make_interval(secs => %s))",
            [queue, list(msg_ids), seconds],
        )
        return [int(row[0]) for row in rows]

    def purge(self, queue: str) -> int:
        return int(self._rows("SELECT pgmq.purge_queue(%s)", [queue])[0][0])

    def metrics(self, queue: str) -> QueueMetrics:
        row = self._rows(
            "SELECT queue_name, queue_length, queue_visible_length, oldest_msg_age_sec FROM pgmq.metrics(%s)", [queue]
        )[0]
        return QueueMetrics(*row)

    def archived(self, queue: str, msg_id: int) -> Any | None:
        """The body of an archived message, which PGMQ has no function for."""
        rows = self._rows(
            sql.SQL("SELECT message FROM pgmq.{} WHERE msg_id = %s").format(sql.Identifier(f"a_{queue}")), [msg_id]
        )
        return json.loads(rows[0][0]) if rows else None

    def shift_visibility(self, queue: str, by: timedelta) -> None:
        """Let `by` pass for every message of a queue. For tests, which have no time to wait."""
        self._rows(
            sql.SQL("UPDATE pgmq.{} SET vt = vt - %s RETURNING msg_id").format(sql.Identifier(f"q_{queue}")), [by]
        )

    def _ids(self, query: str, queue: str, msg_ids: Sequence[int]) -> list[int]:
        return [int(row[0]) for row in self._rows(query, [queue, list(msg_ids)])]

    def _rows(self, query: str | sql.Composed, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with connections[self.using].cursor() as cursor:
            cursor.execute(query, params)
            return list(cursor.fetchall())


def _message(row: tuple[Any, ...]) -> Message:
    msg_id, read_ct, enqueued_at, vt, body = row
    return Message(msg_id, read_ct, enqueued_at, vt, None if body is None else json.loads(body))
