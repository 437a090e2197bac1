"""reliable-cmd: commands on PGMQ with metadata and audit, in its threaded worker. No replies, the default."""

from __future__ import annotations

import importlib
import importlib.metadata
import signal
import sys
import threading
from collections.abc import Callable
from importlib.resources import files
from typing import Any
from uuid import uuid4

import psycopg
from pgmq.install import get_embedded_install_sql
from psycopg_pool import ConnectionPool

from benchmarks.peers.job import counter, payload
from benchmarks.peers.postgres import how_many
from benchmarks.peers.processes import in_processes
from benchmarks.side import Side, main

# Jobs per second by processes × threads: 1 × 4, the default, 860; 1 × 10 1,030; 2 × 4 980; 2 × 10 1,330; 2 × 30 1,390;
# 4 × 4 1,250; 4 × 10 1,270.
PROCESSES = 2
CONCURRENCY = 20


def _package() -> Any:
    """Its package is called commandbus too. The one of the checkout must not be found before it."""
    sys.path.insert(0, str(importlib.metadata.distribution("reliable-cmd").locate_file("")))
    statements = importlib.import_module("commandbus._core.pgmq_sql").PgmqSQL
    # It selects *, and was written before PGMQ's messages had a last_read_at.
    statements.READ = "SELECT msg_id, read_ct, enqueued_at, vt, message FROM pgmq.read(%s, %s, %s)"
    return importlib.import_module("commandbus")


class ReliableCmd(Side):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.package = _package()
        self._bus: Any = None

    def prepare(self) -> None:
        migrations = [file for file in files("commandbus.migrations").iterdir() if file.name.endswith(".sql")]
        with psycopg.connect(self.url) as connection:
            connection.execute(get_embedded_install_sql(), None)
            for file in sorted(migrations, key=lambda file: file.name):
                # PGMQ is there already, as plain SQL: the server may lack the extension.
                statements = file.read_text().replace("CREATE EXTENSION IF NOT EXISTS pgmq;", "")
                connection.execute(statements.encode(), None)
            connection.execute("SELECT pgmq.create('bench__commands')")

    def _pool(self, size: int) -> ConnectionPool:
        return ConnectionPool(self.url, min_size=size, max_size=size, open=True)

    @property
    def bus(self) -> Any:
        if self._bus is None:
            self._bus = self.package.SyncCommandBus(self._pool(1))
        return self._bus

    def fill(self, count: int) -> None:
        request = self.package.SendRequest
        self.bus.send_batch([request("bench", "Noop", uuid4(), payload(number)) for number in range(count)])

    def sender(self) -> Callable[[], None]:
        bus = self.bus

        def send() -> None:
            bus.send("bench", "Noop", uuid4(), payload(1))

        return send

    def work(self) -> None:
        in_processes(PROCESSES, self._work)

    def _work(self) -> None:
        registry = self.package.HandlerRegistry()
        registry.register_sync("bench", "Noop", lambda command, context: counter.handled())
        with self._pool(CONCURRENCY + 1) as pool:  # one listens
            worker = self.package.SyncWorker(pool, "bench", registry)
            # In a thread: it takes a lock that the interrupted code may hold.
            signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=worker.stop).start())
            worker.run(concurrency=CONCURRENCY)

    def remaining(self) -> int:
        return how_many(self.url, "SELECT count(*) FROM pgmq.q_bench__commands")


if __name__ == "__main__":
    main(ReliableCmd)
