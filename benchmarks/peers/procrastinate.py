"""Procrastinate on psycopg. It keeps ended jobs and an event per change of status, the default."""

from __future__ import annotations

from collections.abc import Callable

import procrastinate
import uvloop

from benchmarks.peers.job import chunks, counter, payload
from benchmarks.peers.postgres import how_many
from benchmarks.peers.processes import in_processes
from benchmarks.side import Side, main

# Jobs per second by processes × concurrency: 1 × 1 250; 1 × 10 710; 2 × 4 910; 2 × 10 1,100; 4 × 5 1,030; 4 × 10 1,000;
# 8 × 5 890. uvloop adds a tenth. Chunks of 100 and of 5,000 are sent no faster.
CHUNK = 1000
PROCESSES = 2
CONCURRENCY = 10


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
        in_processes(PROCESSES, lambda: uvloop.run(self._work()))

    async def _work(self) -> None:
        async with self.app.open_async():
            await self.app.run_worker_async(concurrency=CONCURRENCY)

    def remaining(self) -> int:
        return how_many(self.url, "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')")


if __name__ == "__main__":
    main(Procrastinate)
