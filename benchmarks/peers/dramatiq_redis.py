"""Dramatiq on Redis, without results. It has no bulk interface."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker

from benchmarks.peers.job import counter, payload
from benchmarks.side import Side, main

URL = "BENCHMARK_URL"
# Jobs per second by processes × threads: 2 × 8, the default here, 4,200; with 1,000 prefetched 6,100; then 1 × 8 3,800;
# 2 × 2 7,900; 3 × 1 9,500; 3 × 2 9,500; 4 × 1 9,600; 4 × 2 8,600.
PROCESSES = 3
THREADS = 2
PREFETCH = 1000
IDLE_MILLISECONDS = 100  # it polls; the default is a second


def noop(n: int, account: str, amount: int) -> None:
    counter.handled()


def setup() -> Any:
    """Called by the worker's command line too. The actor."""
    dramatiq.set_broker(RedisBroker(url=os.environ[URL]))
    return dramatiq.actor(noop)


class Dramatiq(Side):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        os.environ[URL] = url

    def prepare(self) -> None:
        pass

    def fill(self, count: int) -> None:
        actor = setup()
        for number in range(count):
            actor.send(**payload(number))

    def sender(self) -> Callable[[], None]:
        actor = setup()

        def send() -> None:
            actor.send(**payload(1))

        return send

    def work(self) -> None:
        words = ["-m", "dramatiq", "benchmarks.peers.dramatiq_redis:setup"]
        sizes = [f"--processes={PROCESSES}", f"--threads={THREADS}"]
        options = {"dramatiq_queue_prefetch": str(PREFETCH), "dramatiq_worker_timeout": str(IDLE_MILLISECONDS)}
        os.execve(sys.executable, [sys.executable, *words, *sizes], {**os.environ, **options})

    def remaining(self) -> int:
        with redis.Redis.from_url(self.url) as client:
            return int(client.hlen("dramatiq:default.msgs"))  # waiting, and fetched but not acknowledged


if __name__ == "__main__":
    main(Dramatiq)
