"""Celery on Redis: prefork, no results, acknowledged before the task runs, as it does by default."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import redis
from celery import Celery

from benchmarks.peers.job import counter, payload
from benchmarks.peers.processes import in_processes
from benchmarks.side import Side, main

URL = "BENCHMARK_URL"
NODES = 2
PROCESSES = 1
PREFETCH = 64

app = Celery("benchmark", broker=os.environ.get(URL))
app.conf.update(broker_connection_retry_on_startup=True, task_ignore_result=True)


@app.task(name="noop")
def noop(n: int, account: str, amount: int) -> None:
    counter.handled()


class CelerySide(Side):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        os.environ[URL] = app.conf.broker_url = url

    def prepare(self) -> None:
        pass

    def fill(self, count: int) -> None:
        with app.producer_pool.acquire(block=True) as producer:
            for number in range(count):
                noop.apply_async(kwargs=payload(number), producer=producer)

    def sender(self) -> Callable[[], None]:
        def send() -> None:
            noop.apply_async(kwargs=payload(1))

        return send

    def work(self) -> None:
        in_processes(NODES, self._work)

    def _work(self) -> None:
        options = [
            *("--pool=prefork", f"--concurrency={PROCESSES}", f"--prefetch-multiplier={PREFETCH}"),
            *(f"--hostname={os.getpid()}@%h", "--without-gossip", "--without-mingle", "--without-heartbeat"),
        ]
        words = ["-m", "celery", "--app=benchmarks.peers.celery_redis", "--quiet", "worker", "--loglevel=WARNING"]
        os.execv(sys.executable, [sys.executable, *words, *options])

    def remaining(self) -> int:
        with redis.Redis.from_url(self.url) as client:
            return int(client.llen("celery")) + int(client.hlen("unacked"))


if __name__ == "__main__":
    main(CelerySide)
