"""Procrastinate on psycopg. It keeps ended jobs and an event for each change of status, its default."""

from __future__ import annotations

from collections.abc import Callable

import procrastinate
import uvloop

from benchmarks.peers.job import chunks, counter, payload
from benchmarks.peers.postgres import analyze, count
from benchmarks.peers.processes import in_processes
from benchmarks.side import Side, main

CHUNK = 1000
PROCESSES = 4
CONCURRENCY = 5


class Procrastinate(Side):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        # As many connections as jobs at a time and one more: what it recommends for short jobs.
        connector = procrastinate.PsycopgConnector(conninfo=url, min_size=1, max_size=CONCURRENCY + 1)
        self.app = procrastinate.App(connector=connector)

        @self.app.task(name="noop")
        async def noop(n: int, account: str, amount: int) -> None:
            counter.handled()

        self.noop = noop

    def prepare(self) -> None:
        with self.app.open():
            self.app.schema_manager.apply_schema()

    def fill(self, count: int) -> None:
        with self.app.open():
            for numbers in chunks(count, CHUNK):
                self.noop.batch_defer(*map(payload, numbers))

    def sender(self) -> Callable[[], None]:
        self.app.open()

        def send() -> None:
            self.noop.defer(**payload(1))

        return send

    def work(self) -> None:
        analyze(self.url)
        in_processes(PROCESSES, lambda: uvloop.run(self._work()))

    async def _work(self) -> None:
        async with self.app.open_async():
            await self.app.run_worker_async(concurrency=CONCURRENCY)

    def remaining(self) -> int:
        return count(self.url, "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')")


if __name__ == "__main__":
    main(Procrastinate)
