"""commandbus itself: audit, metadata, replies and fencing on, as every user has them."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator

import django
from django.core.management import call_command
from django.db import connection

import commandbus
from benchmarks.side import Side, main


class Ours(Side):
    def __init__(
        self,
        url: str,
        kind: str = "io",
        processes: int = 2,
        concurrency: int = 2,
        *,
        batch: bool = False,
        random_ids: bool = False,
    ) -> None:
        """`batch`: what is filled in at once is one batch. `random_ids`: its ids are in no order."""
        super().__init__(url)
        self.kind = kind
        self.processes = processes
        self.concurrency = concurrency
        self.batch = batch
        self.make_id = uuid.uuid4 if random_ids else commandbus.uuid7
        os.environ["BENCHMARK_URL"] = url
        os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
        django.setup()

    def prepare(self) -> None:
        call_command("migrate", verbosity=0)
        with connection.cursor() as cursor:
            cursor.execute("CREATE TABLE effect (n integer NOT NULL, account text NOT NULL)")

    def fill(self, count: int) -> None:
        if self.batch:
            commandbus.create_batch("bench", self._commands(count))
        else:
            commandbus.send_commands("bench", self._commands(count))

    def _commands(self, count: int) -> Iterator[commandbus.NewCommand]:
        for number in range(count):
            yield commandbus.NewCommand(self.kind, self.make_id(), {"n": number, "account": "DE-1", "amount": 10})

    def sender(self) -> Callable[[], None]:
        send_command, uuid7 = commandbus.send_command, commandbus.uuid7

        def send() -> None:
            send_command("bench", self.kind, uuid7(), {"n": 1, "account": "DE-1", "amount": 10})

        return send

    def work(self) -> None:
        words = [f"--processes={self.processes}", f"--concurrency={self.concurrency}"]
        os.execv(sys.executable, [sys.executable, "-m", "django", "commandbus_worker", "bench", *words])

    def remaining(self) -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pgmq.q_bench__commands")
            return int(cursor.fetchone()[0])


if __name__ == "__main__":
    main(Ours)
