"""Workers under random faults, and then an account of every command that was ever sent.

    python -m tests.soak --seconds 60 --seed 42

Faults are random, so a failure may not come back with its seed; what is sent and which fault comes next does.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import django
from django.db import DatabaseError, InterfaceError, connection, transaction

from commandbus import NewCommand
from commandbus.embedded import EmbeddedPostgres, home_for, remove

DATABASE = "soak"
T = TypeVar("T")
WORKER = ("orders", "--vt=2", "--concurrency=4", "--processes=2")
PATIENCE = 180.0

# What is sent: type, data, and how it must end.
KINDS: list[tuple[int, str, dict[str, Any], str]] = [
    (10, "PlaceOrder", {}, "COMPLETED"),
    (5, "PlaceOrder", {"sleep": 0.05}, "COMPLETED"),
    (1, "PlaceOrder", {"sleep": 3}, "COMPLETED"),
    (3, "PlaceOrder", {"fail_attempts": 1}, "COMPLETED"),
    (2, "PlaceOrder", {"permanent": True}, "IN_TROUBLESHOOTING_QUEUE"),
    (2, "PlaceOrder", {"refuse": True}, "FAILED"),
    (10, "SendMail", {}, "COMPLETED"),
    (3, "SendMail", {"fail_attempts": 1}, "COMPLETED"),
    (10, "ImportOrders", {}, "COMPLETED"),
    (5, "CreateAsync", {}, "COMPLETED"),
]
KILLER = ("PlaceOrder", {"kill": True}, "IN_TROUBLESHOOTING_QUEUE")
WRITES_AN_ORDER = {"PlaceOrder", "ImportOrders", "CreateAsync"}


@dataclass
class Soak:
    chance: random.Random
    server: EmbeddedPostgres
    log: Path
    expected: dict[UUID, tuple[str, str]] = field(default_factory=dict)
    taken_back: list[UUID] = field(default_factory=list)
    batches: dict[UUID, list[UUID]] = field(default_factory=dict)
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)

    def run(self, seconds: float) -> None:
        faults = [self.kill_a_process, self.kill_a_worker, self.stop_a_process, self.end_sessions, self.hold_locks]
        rare_faults = [self.restart_postgres, self.send_a_killer, self.pause, self.prune]
        until = time.monotonic() + seconds
        self.start_worker()
        self.start_worker()
        while time.monotonic() < until:
            self.send(self.chance.randint(1, 60))
            time.sleep(self.chance.uniform(0, 1))
            fault = self.chance.choice(rare_faults if self.chance.random() < 0.25 else faults)
            self.faults[fault.__name__] += 1
            fault()
            self.go_on()
        self.check()

    def start_worker(self) -> None:
        with self.log.open("ab") as log:
            self.workers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "django", "commandbus_worker", *WORKER],
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def send(self, count: int) -> None:
        from commandbus import send_commands

        weights = [kind[0] for kind in KINDS]
        new = {UUID(int=self.chance.getrandbits(128)): self.chance.choices(KINDS, weights)[0][1:] for _ in range(count)}
        commands = [NewCommand(kind, command_id, data) for command_id, (kind, data, _) in new.items()]
        if self.chance.random() < 0.1:
            persistently(lambda: self.send_and_take_back(commands))
            self.taken_back += new
            return
        if self.chance.random() < 0.3:
            self.send_batch(commands, [end for _, _, end in new.values()])
        else:
            persistently(lambda: send_commands("orders", commands))
        if self.chance.random() < 0.3:
            persistently(lambda: send_commands("orders", commands))  # duplicates
        self.expected |= {command_id: (kind, end) for command_id, (kind, _, end) in new.items()}

    def send_batch(self, commands: list[NewCommand], ends: list[str]) -> None:
        from commandbus import add_to_batch, open_batch, seal_batch

        batch_id, callback = (UUID(int=self.chance.getrandbits(128)) for _ in range(2))
        on_complete = NewCommand("SendMail", callback, {})
        persistently(lambda: open_batch("orders", len(commands), batch_id=batch_id, on_complete=on_complete))
        for half in (commands[::2], commands[1::2]):
            persistently(lambda half=half: add_to_batch("orders", batch_id, half))  # type: ignore[misc]
        persistently(lambda: seal_batch("orders", batch_id))
        self.batches[batch_id] = [command.command_id for command in commands]
        if "IN_TROUBLESHOOTING_QUEUE" not in ends:
            self.expected[callback] = ("SendMail", "COMPLETED")

    def send_and_take_back(self, commands: list[NewCommand]) -> None:
        from commandbus import send_commands

        with transaction.atomic():
            send_commands("orders", commands)
            transaction.set_rollback(True)

    # The faults.

    def kill_a_process(self) -> None:
        from commandbus.models import Node

        # (Not one that runs a suspect: who dies alone is guilty, and this one would not be.)
        living = persistently(lambda: list(Node.objects.filter(stopped_at=None, role="worker")))
        for node in self.chance.sample(living, min(1, len(living))):
            _signal(node.pid, signal.SIGKILL)

    def kill_a_worker(self) -> None:
        worker = self.workers.pop(self.chance.randrange(len(self.workers)))
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        self.start_worker()

    def stop_a_process(self) -> None:
        from commandbus.models import Node

        living = persistently(lambda: list(Node.objects.filter(stopped_at=None)))
        for node in self.chance.sample(living, min(1, len(living))):
            _signal(node.pid, signal.SIGSTOP)
            self.stopped.append(node.pid)

    def go_on(self) -> None:
        if self.stopped and self.chance.random() < 0.5:
            _signal(self.stopped.pop(), signal.SIGCONT)

    def end_sessions(self) -> None:
        def end() -> None:
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid() AND pid %% 3 = %s",
                    [self.chance.randrange(3)],
                )

        persistently(end)

    def hold_locks(self) -> None:
        from commandbus.models import Command

        def hold() -> None:
            with transaction.atomic():
                list(Command.objects.select_for_update(skip_locked=True).filter(status="PENDING")[:20])
                time.sleep(0.5)

        persistently(hold)

    def restart_postgres(self) -> None:
        self.server.restart("immediate")

    def send_a_killer(self) -> None:
        from commandbus import send_command

        kind, data, end = KILLER
        command_id = UUID(int=self.chance.getrandbits(128))
        persistently(lambda: send_command("orders", kind, command_id, data))
        self.expected[command_id] = (kind, end)

    def pause(self) -> None:
        from commandbus import pause_domain, resume_domain

        persistently(lambda: pause_domain("orders"))
        time.sleep(0.5)
        persistently(lambda: resume_domain("orders"))

    def prune(self) -> None:
        """Nothing is old enough, but it looks at everything."""
        from django.utils import timezone

        from commandbus.transitions import PostgresTransitions

        bus = PostgresTransitions("default")
        persistently(lambda: bus.prune_commands("orders", timezone.now().replace(year=2000), 1000))

    # The account.

    def check(self) -> None:
        from commandbus.messages import LIVE, TERMINAL
        from commandbus.models import Audit, BatchDelta, Command, Suspect
        from commandbus.pgmq import PgmqClient
        from tests.shop.models import Order

        for pid in self.stopped:
            _signal(pid, signal.SIGCONT)
        deadline = time.monotonic() + PATIENCE
        while live := persistently(
            lambda: Command.objects.filter(status__in=LIVE).count() or BatchDelta.objects.count()
        ):
            assert time.monotonic() < deadline, f"{live} commands are still not resolved, or not counted"
            time.sleep(0.2)
        for worker in self.workers:
            worker.terminate()
            assert worker.wait(60) == 0, "a worker did not end well"

        found = dict(Command.objects.values_list("command_id", "status"))
        assert set(found) == set(self.expected), "commands are lost, or were never sent"
        wrong = {str(i): (found[i], end) for i, (_, end) in self.expected.items() if found[i] != end}
        assert not wrong, f"commands ended as they must not: {wrong}"

        orders = Counter(Order.objects.values_list("number", flat=True))
        wanted = Counter(
            str(i) for i, (kind, end) in self.expected.items() if kind in WRITES_AN_ORDER and end == "COMPLETED"
        )
        assert orders == wanted, f"effects are lost or doubled: {orders - wanted} {wanted - orders}"

        resolved = Counter(str(i) for i, (_, end) in self.expected.items() if end in TERMINAL)
        with connection.cursor() as cursor:
            cursor.execute("SELECT message ->> 'command_id' FROM pgmq.q_orders__replies")
            replies = Counter(row[0] for row in cursor.fetchall())
        assert replies == resolved, f"replies are lost or doubled: {replies - resolved} {resolved - replies}"

        for events, ids in (
            (["SENT"], list(self.expected)),
            (list(TERMINAL), [i for i, (_, end) in self.expected.items() if end in TERMINAL]),
        ):
            audited = Counter(Audit.objects.filter(event_type__in=events).values_list("command_id", flat=True))
            assert audited == Counter(ids), f"the audit of {events} is not right"
        assert PgmqClient().metrics("orders__commands").queue_length == 0, "messages are left"
        assert not Suspect.objects.exists(), "suspects are left"
        self.check_batches()
        attempts = Command.objects.filter(status="COMPLETED", attempts__gt=2).count()
        ends = Counter(found.values())
        print(f"{len(found)} commands: {dict(ends)}; {attempts} needed more than two attempts")  # noqa: T201
        print(f"{len(self.batches)} batches")  # noqa: T201
        print(f"{len(self.taken_back)} were sent and rolled back; faults: {dict(self.faults)}")  # noqa: T201

    def check_batches(self) -> None:
        from commandbus import get_batch, repair_batches
        from commandbus.models import Audit

        complete = []
        for batch_id, ids in self.batches.items():
            ends = Counter(self.expected[command_id][1] for command_id in ids)
            batch = get_batch("orders", batch_id)
            assert batch is not None, "a batch is lost"
            counted = {
                "COMPLETED": batch.completed_count,
                "FAILED": batch.failed_count,
                "CANCELED": batch.canceled_count,
                "IN_TROUBLESHOOTING_QUEUE": batch.in_troubleshooting_count,
            }
            assert +Counter(counted) == ends, f"batch {batch_id} counts {counted} where there are {ends}"
            assert batch.total_count == len(ids)
            assert batch.is_complete == (batch.in_troubleshooting_count == 0)
            complete += [batch_id] if batch.is_complete else []
        for event, batches in (("BATCH_STARTED", list(self.batches)), ("BATCH_COMPLETED", complete)):
            audited = Counter(Audit.objects.filter(event_type=event).values_list("batch_id", flat=True))
            assert audited == Counter(batches), f"the audit of {event} is not right"
        assert repair_batches("orders") == []


def persistently(action: Callable[[], T]) -> T:
    """PostgreSQL may be away, or has just ended our session. To repeat is safe: sending is idempotent."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return action()
        except (DatabaseError, InterfaceError):
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@contextmanager
def soaking(chance: random.Random) -> Iterator[Soak]:
    home = home_for(Path(tempfile.gettempdir()) / f"commandbus-soak-{os.getpid()}")
    with tempfile.TemporaryDirectory() as folder, EmbeddedPostgres(home, settings={"fsync": "off"}) as server:
        server.create_database(DATABASE)
        os.environ.update(
            DJANGO_SETTINGS_MODULE="tests.settings",
            COMMANDBUS_TEST_HOST=str(server.data),
            COMMANDBUS_TEST_DATABASE=DATABASE,
        )
        subprocess.run([sys.executable, "-m", "django", "migrate", "-v0"], check=True)
        django.setup()
        soak = Soak(chance, server, Path(folder) / "workers.log")
        try:
            yield soak
        except BaseException:
            print("\n".join(soak.log.read_text().splitlines()[-200:]))  # noqa: T201
            raise
        finally:
            for worker in soak.workers:
                if worker.poll() is None:
                    os.killpg(worker.pid, signal.SIGKILL)
                    worker.wait()
    remove(home)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)  # noqa: T201
    with soaking(random.Random(options.seed)) as soak:
        soak.run(options.seconds)


if __name__ == "__main__":
    main()
