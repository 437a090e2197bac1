"""The demo: migrate, start a worker and the web server, send traffic, and show what becomes of it."""

from __future__ import annotations

import ctypes
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from uuid import UUID, uuid4

from django.contrib.auth.models import User
from django.core.management import call_command
from django.core.management.base import OutputWrapper
from django.db import transaction

from commandbus import DuplicateCommandError, Status, send_command
from commandbus.messages import LIVE
from commandbus.models import Audit, Command
from commandbus.pgmq import PgmqClient
from example_project.database import CHECKOUT
from example_project.payments.models import Account, Entry

ROUND = 20  # commands of each kind in one round
PATIENCE = 60  # seconds until everything sent must have ended
PR_SET_PDEATHSIG = 1


class DemoFailedError(Exception):
    """What happened does not add up; the message says where."""


class _Interrupted(Exception):  # noqa: N818 - not an error
    pass


class Demo:
    def __init__(self, out: OutputWrapper) -> None:
        self.out = out
        self.run_id = uuid4()  # all commands of this run share it as their correlation id
        self.expected: Counter[str] = Counter()
        self.duplicates = 0

    def run(self, *, once: bool) -> None:
        self._say("Preparing the database …")
        call_command("migrate", verbosity=0)
        password = self._admin_user()
        Account.objects.update_or_create(number="DE-1", defaults={"balance": 1_000_000})
        port = _free_port(8000)
        with (
            _interruptible(),
            _process("worker", "commandbus_worker", "payments", "reports") as worker,
            _process("web", "runserver", "--noreload", f"127.0.0.1:{port}") as web,
        ):
            self._say(f"Admin:   http://127.0.0.1:{port}/admin/   user: admin   password: {password}")
            try:
                self._send_round()
                if once:
                    self._wait_until_ended([worker, web])
                    self._report()
                else:
                    self._stay([worker, web])
            except _Interrupted:
                if once:
                    raise DemoFailedError("interrupted before everything had ended") from None
                self._say("\nStopping.")

    def _send_round(self) -> None:
        """One round of everything: all of it in one transaction, as an application would."""
        with transaction.atomic():
            for number in range(ROUND):
                first = self._debit(amount=f"{number + 1}.00")
                self._duplicate(first, f"{number + 1}.00")
                self._debit(amount="5.00", bank_is_down_for_attempts=1 + number % 2)
                send_command(
                    "reports",
                    "RenderReport",
                    uuid4(),
                    {"month": f"2026-{1 + number % 12:02}"},
                    correlation_id=self.run_id,
                )
            self.expected[Status.COMPLETED] += 3 * ROUND
            for _ in range(ROUND // 4):
                self._debit(amount="a lot")  # can never work: ends in the Troubleshooting Queue
                self._debit(amount="1.00", bank_is_down_for_attempts=99)  # exhausts its attempts: likewise
                self._debit(amount="9000000.00")  # refused by a business rule
            self.expected[Status.IN_TROUBLESHOOTING_QUEUE] += 2 * (ROUND // 4)
            self.expected[Status.FAILED] += ROUND // 4

    def _debit(self, **data: object) -> UUID:
        return send_command(
            "payments", "DebitAccount", uuid4(), {"account": "DE-1", **data}, correlation_id=self.run_id
        )

    def _duplicate(self, command_id: UUID, amount: str) -> None:
        """Send the same command again, then something else under its id. Neither has an effect."""
        same = {"account": "DE-1", "amount": amount}
        send_command("payments", "DebitAccount", command_id, same, correlation_id=self.run_id)
        self.duplicates += 1
        with suppress(DuplicateCommandError):
            send_command("payments", "DebitAccount", command_id, {**same, "amount": "7.77"})
            raise DemoFailedError(f"{command_id} was taken twice with different content")

    def _wait_until_ended(self, processes: list[subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + PATIENCE
        while (counts := self._counts())[Status.PENDING] + counts[Status.IN_PROGRESS]:
            self._status_line(counts)
            _require_running(processes)
            if time.monotonic() > deadline:
                raise DemoFailedError(f"not everything ended within {PATIENCE} seconds: {dict(counts)}")
            time.sleep(0.5)
        self._status_line(self._counts())
        self._say("")

    def _stay(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._say("Sending more every few seconds. Ctrl-C ends it.")
        next_round = time.monotonic() + 5
        while True:
            _require_running(processes)
            if time.monotonic() > next_round:
                self._send_round()
                next_round = time.monotonic() + random.uniform(5, 10)  # noqa: S311
            self._status_line(self._counts())
            time.sleep(1)

    def _report(self) -> None:
        statuses = self._counts()
        ids = list(Command.objects.filter(correlation_id=self.run_id).values_list("command_id", flat=True))
        audit = Counter(Audit.objects.filter(command_id__in=ids).values_list("event_type", flat=True))
        replies = self._replies()
        entries = Entry.objects.filter(command_id__in=ids).count()
        self._say("")
        for title, counts in (("Status", statuses), ("Audit event", audit), ("Reply", replies)):
            self._say(f"{title:<34}{'count':>8}")
            for name, count in sorted(counts.items()):
                self._say(f"  {name:<32}{count:>8}")
        self._say(f"{'Duplicates sent, without effect':<34}{self.duplicates:>8}")
        self._say(f"{'Debits booked':<34}{entries:>8}")
        self._check("statuses", {k: v for k, v in statuses.items() if v}, dict(self.expected))
        self._check("commands", len(ids), sum(self.expected.values()))
        self._check("SENT events", audit["SENT"], len(ids))
        self._check("COMPLETED events", audit["COMPLETED"], statuses[Status.COMPLETED])
        self._check("FAILED events", audit["FAILED"], statuses[Status.FAILED])
        self._check(
            "events for the Troubleshooting Queue",
            audit["MOVED_TO_TROUBLESHOOTING_QUEUE"],
            statuses[Status.IN_TROUBLESHOOTING_QUEUE],
        )
        self._check("SUCCESS replies", replies["SUCCESS"], statuses[Status.COMPLETED])
        self._check("FAILED replies", replies["FAILED"], statuses[Status.FAILED])
        self._check("debits booked", entries, 2 * ROUND)
        self._say("It adds up.")

    def _check(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            raise DemoFailedError(f"{what} do not add up: expected {expected}, found {found}")

    def _replies(self) -> Counter[str]:
        """Consume the reply queues, as the sender would, and count the replies of this run."""
        client = PgmqClient()
        outcomes: Counter[str] = Counter()
        for queue in ("payments__replies", "reports__replies"):
            while messages := client.read(queue, vt=30, qty=500):
                mine = [m for m in messages if m.message["correlation_id"] == str(self.run_id)]
                outcomes.update(message.message["outcome"] for message in mine)
                client.delete(queue, [message.msg_id for message in messages])
        return outcomes

    def _counts(self) -> Counter[str]:
        commands = Command.objects.filter(correlation_id=self.run_id)
        return Counter(commands.values_list("status", flat=True))

    def _status_line(self, counts: Counter[str]) -> None:
        waiting = sum(counts[status] for status in LIVE)
        line = (
            f"sent {sum(counts.values())}  waiting {waiting}  completed {counts[Status.COMPLETED]}  "
            f"failed {counts[Status.FAILED]}  troubleshooting {counts[Status.IN_TROUBLESHOOTING_QUEUE]}"
        )
        if self.out.isatty():
            self.out.write(f"\r\033[K{line}", ending="")
            self.out.flush()
        else:
            self._say(line)

    def _admin_user(self) -> str:
        password = secrets.token_urlsafe(9)
        user, _ = User.objects.get_or_create(username="admin", defaults={"is_staff": True, "is_superuser": True})
        user.set_password(password)
        user.save()
        return password

    def _say(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()


@contextmanager
def _process(name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child of ours with a log file of its own. It ends with us, even if we are killed."""
    folder = CHECKOUT / "build" / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - our own command line
            [sys.executable, str(CHECKOUT / "manage.py"), *arguments],
            cwd=CHECKOUT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _require_running(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is not None:
            name = " ".join(str(word) for word in process.args[2:])  # type: ignore[index]
            logs = Path(CHECKOUT, "build", "demo")
            raise DemoFailedError(f"'manage.py {name}' ended with {process.returncode}; its log is in {logs}")


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Interrupted

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    except _Interrupted:
        pass
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _free_port(first: int) -> int:
    for port in range(first, first + 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise DemoFailedError(f"no free port from {first} to {first + 99}")
