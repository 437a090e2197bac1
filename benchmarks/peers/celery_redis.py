"""Celery on Redis: prefork, no results, no bulk interface. A task is acknowledged before it runs, the default."""

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
# Jobs per second by nodes × processes: 1 × 1 970; 1 × 2 1,070; 1 × 4 1,080; 2 × 1 1,600; 2 × 2 1,590; 3 × 1 1,460;
# 4 × 1 1,490. To prefetch 4, the default, or 1,000 changes nothing; a group is sent no faster than its tasks.
NODES = 2
PROCESSES = 1
PREFETCH = 128

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
        for number in range(count):
            noop.apply_async(kwargs=payload(number))

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
        # A busy worker takes half a minute for the warm shutdown of SIGTERM.
        cold = {"REMAP_SIGTERM": "SIGQUIT"}
        os.execve(sys.executable, [sys.executable, *words, *options], {**os.environ, **cold})

    def remaining(self) -> int:
        with redis.Redis.from_url(self.url) as client:
            return int(client.llen("celery")) + int(client.hlen("unacked"))


if __name__ == "__main__":
    main(CelerySide)
