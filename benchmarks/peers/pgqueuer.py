"""PgQueuer on asyncpg and uvloop, with its own autovacuum settings. Ended jobs move to its log, the default."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import asyncpg
import pgqueuer
import uvloop
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from benchmarks.peers.job import chunks, counter, payload
from benchmarks.peers.postgres import how_many
from benchmarks.peers.processes import in_processes
from benchmarks.side import Side, main

# Jobs per second by processes × batch: 1 × 10, the default, 5,000; 1 × 100 12,000; 2 × 300 27,000; 2 × 500 29,000;
# 2 × 1000 28,000; 3 × 300 27,000. A pool instead of a connection for each worker changes nothing; psycopg sends slower.
CHUNK = 5000
PROCESSES = 2
BATCH = 500


class PgQueuer(Side):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._run = uvloop.new_event_loop().run_until_complete
        self._queries: Queries | None = None

    async def _connected(self) -> Queries:
        if self._queries is None:
            self._queries = Queries(AsyncpgDriver(await asyncpg.connect(self.url)))
        return self._queries

    def prepare(self) -> None:
        async def install() -> None:
            queries = await self._connected()
            await queries.install()
            await queries.optimize_autovacuum()

        self._run(install())

    def fill(self, count: int) -> None:
        async def send() -> None:
            queries = await self._connected()
            for numbers in chunks(count, CHUNK):
                await queries.enqueue(["noop"] * len(numbers), [*map(_body, numbers)], [0] * len(numbers))

        self._run(send())

    def sender(self) -> Callable[[], None]:
        queries = self._run(self._connected())

        def send() -> None:
            self._run(queries.enqueue("noop", _body(1)))

        return send

    def send_single(self, count: int) -> None:
        async def send() -> None:
            queries = await self._connected()
            for number in range(count):
                await queries.enqueue("noop", _body(number))

        self._run(send())

    def work(self) -> None:
        in_processes(PROCESSES, lambda: uvloop.run(pgqueuer.run(self._worker, batch_size=BATCH)))

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[pgqueuer.PgQueuer]:
        worker = pgqueuer.PgQueuer(AsyncpgDriver(await asyncpg.connect(self.url)))

        @worker.entrypoint("noop")
        async def noop(job: Job) -> None:
            counter.handled()

        yield worker

    def remaining(self) -> int:
        return how_many(self.url, "SELECT count(*) FROM pgqueuer")


def _body(number: int) -> bytes:
    return json.dumps(payload(number)).encode()


if __name__ == "__main__":
    main(PgQueuer)
