"""PGMQ alone, by its functions: no metadata, no audit, no reply, no second chance."""

from __future__ import annotations

import json
import signal
import threading
import uuid
from collections.abc import Callable

import psycopg
from pgmq.install import get_embedded_install_sql

from benchmarks.counter import Counter
from benchmarks.side import Side, main

CHUNK = 1000
READ = 100


class Raw(Side):
    def connect(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(self.url, autocommit=True)

    def prepare(self) -> None:
        with self.connect() as connection:
            connection.execute(get_embedded_install_sql(), None)
            connection.execute("SELECT pgmq.create('bench')")

    def fill(self, count: int) -> None:
        with self.connect() as connection, connection.transaction():
            for start in range(0, count, CHUNK):
                bodies = [_body(number) for number in range(start, min(start + CHUNK, count))]
                connection.execute("SELECT pgmq.send_batch('bench', %b::text[]::jsonb[])", [bodies])

    def sender(self) -> Callable[[], None]:
        connection = self.connect()

        def send() -> None:
            connection.execute("SELECT pgmq.send('bench', %s::jsonb)", [_body(1)])

        return send

    def work(self) -> None:
        stopped = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stopped.set())
        counter = Counter()
        with self.connect() as connection:
            while not stopped.is_set():
                cursor = connection.execute("SELECT msg_id, message FROM pgmq.read('bench', 30, %s)", [READ])
                messages = cursor.fetchall()
                if not messages:
                    stopped.wait(0.05)
                    continue
                counter.handled(len(messages))
                connection.execute("SELECT pgmq.delete('bench', %b::bigint[])", [[message[0] for message in messages]])

    def remaining(self) -> int:
        with self.connect() as connection:
            cursor = connection.execute("SELECT count(*) FROM pgmq.q_bench")
            return int(str(cursor.fetchall()[0][0]))


def _body(number: int) -> str:
    """As large as a command's message."""
    command_id = str(uuid.uuid4())
    return json.dumps(
        {
            "command_id": command_id,
            "type": "io",
            "domain": "bench",
            "correlation_id": command_id,
            "reply_to": "bench__replies",
            "created_at": "2026-01-01T00:00:00.000000+00:00",
            "data": {"n": number, "account": "DE-1", "amount": 10},
        }
    )


if __name__ == "__main__":
    main(Raw)
