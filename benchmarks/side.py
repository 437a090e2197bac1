"""What the benchmark asks of every system that it measures. Standard library only.

Each system is a module with a class of these methods, run as a script in the environment that it needs:

    python -m benchmarks.peers.pgqueuer <verb> --url postgresql://… [--count 1000]

The verbs are the methods below. Those that answer something print it as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from benchmarks.counter import FOLDER, Tally

WARM_UP = 10
PAUSE = (0.1, 0.2)
"""Between two jobs, so that the worker is idle again. By chance, so that nobody who polls keeps step with it."""


class Side(ABC):
    def __init__(self, url: str) -> None:
        """`url`: of a fresh database, or of a fresh Redis."""
        self.url = url

    @abstractmethod
    def prepare(self) -> None:
        """Install what the system needs in the database."""

    @abstractmethod
    def fill(self, count: int) -> None:
        """Send many no-op jobs the fastest way that the system has."""

    @abstractmethod
    def sender(self) -> Callable[[], None]:
        """A function that sends one no-op job, durable when it returns, over a connection that stays open."""

    def send_single(self, count: int) -> None:
        """Send jobs one by one, each durable before the next. To be replaced where a loop of the system's is faster."""
        send = self.sender()
        for _ in range(count):
            send()

    def warm_up(self, verb: str, count: int) -> None:
        """Before the clock starts. Connections, plans and caches are warm then."""
        getattr(self, verb)(max(1, count // 100))

    def figures(self) -> dict[str, float]:
        """What else there is to know of a send, when it has ended."""
        return {}

    @abstractmethod
    def work(self) -> None:
        """Work jobs until SIGTERM, as the system's documentation recommends for speed. The handler counts."""

    @abstractmethod
    def remaining(self) -> int:
        """How many jobs are not ended."""


def latencies(send: Callable[[], None], count: int) -> list[float]:
    """Of jobs that are sent to an idle worker: from the return of the send to the start of the handler, in seconds."""
    tally = Tally(Path(os.environ[FOLDER]))
    seconds = []
    for number in range(count + WARM_UP):
        time.sleep(random.uniform(*PAUSE))  # noqa: S311 - no secret
        before = tally.total()
        send()
        sent_at = time.monotonic()
        while tally.total() == before:
            time.sleep(0.0002)
        if number >= WARM_UP:
            seconds.append(tally.last_started_at() - sent_at)
    return seconds


def main(side: type[Side]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("--url", required=True)
    parser.add_argument("--count", type=int)
    parser.add_argument("--start-at", type=float, default=0.0, help="on the monotonic clock: when to begin")
    parser.add_argument("--options", type=json.loads, default={}, help="of the system, as JSON")
    arguments = parser.parse_args()
    system = side(arguments.url, **arguments.options)
    match arguments.verb:
        case "fill" | "send_single":
            send = getattr(system, arguments.verb)
            system.warm_up(arguments.verb, arguments.count)
            time.sleep(max(0.0, arguments.start_at - time.monotonic()))
            started_at = time.monotonic()
            send(arguments.count)
            times = {"started_at": started_at, "ended_at": time.monotonic()}
            print(json.dumps({**times, **system.figures()}))  # noqa: T201
        case "latency":
            print(json.dumps({"seconds": latencies(system.sender(), arguments.count)}))  # noqa: T201
        case "await_empty":
            system.remaining()  # it is connected then
            sys.stdin.readline()
            while system.remaining() > 0:
                time.sleep(0.01)
            print(json.dumps({"ended_at": time.monotonic()}))  # noqa: T201
        case "remaining":
            print(json.dumps({"remaining": system.remaining()}))  # noqa: T201
        case verb:
            getattr(system, verb)()
