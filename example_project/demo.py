"""The demo: migrate, start a worker and the web server, send traffic, and show what becomes of it."""

from __future__ import annotations

import ctypes
import json
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
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen
from uuid import UUID, uuid4

from django.contrib.auth.models import User
from django.core.management import call_command
from django.core.management.base import OutputWrapper
from django.db import connections, transaction

from commandbus import (
    BatchCommand,
    BatchMetadata,
    BatchStatus,
    DuplicateCommandError,
    Status,
    conf,
    create_batch,
    ops,
    send_command,
)
from commandbus.messages import LIVE, TERMINAL
from commandbus.models import Audit, Batch, Command
from example_project import payouts
from example_project.database import CHECKOUT
from example_project.payments.models import Account, Entry, Payment
from example_project.payouts import DemoFailedError, Payouts
from example_project.reports.models import Report

ROUND = 20  # commands of each kind in one round
TROUBLED = 5  # of each kind that does not end well
EDITED = 5  # by an operator
TROUBLES = ("INVALID_DATA", "BANK_DOWN")
WEB_PAYMENTS = 3
PATIENCE = 60  # seconds until everything sent must have ended
PR_SET_PDEATHSIG = 1


class _Interrupted(Exception):  # noqa: N818 - not an error
    pass


class Demo:
    def __init__(self, out: OutputWrapper) -> None:
        self.out = out
        self.run_id = uuid4()  # all commands of this run share it as their correlation id
        self.expected: Counter[str] = Counter()
        self.duplicates = 0
        self.payments: list[UUID] = []
        self.batches: list[UUID] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.port = 0
        self.payouts: Payouts | None = None

    def run(self, *, once: bool) -> None:
        self._say("Preparing the database …")
        for using in connections:
            call_command("migrate", database=using, verbosity=0)
        password = self._admin_user()
        Account.objects.update_or_create(number="DE-1", defaults={"balance": 1_000_000})
        with (
            _interruptible(),
            _reserved_port(8000) as self.port,
            _process("worker", "commandbus_worker", "payments", "reports", "--replies", "payments") as worker,
            _process("web", "runserver", "--noreload", f"127.0.0.1:{self.port}") as web,
            _process("spark", *payouts.arguments(_folder(), self.run_id)) as spark,
        ):
            self.processes = [worker, web]
            self.payouts = Payouts(spark, _folder())
            self._say(f"Payments: http://127.0.0.1:{self.port}/payments/")
            self._say(f"Admin:    http://127.0.0.1:{self.port}/admin/   user: admin   password: {password}")
            try:
                self._send_round()
                self._pay_on_the_web()
                if once:
                    self._wait_for_payouts()
                    self._wait_until_ended()
                    self._operate()
                    self._wait_until_ended()
                    self._report()
                else:
                    self._say("Spark starts, and will send a file of payouts as a batch.")
                    self._stay()
            except _Interrupted:
                if once:
                    raise DemoFailedError("interrupted before everything had ended") from None
                self._say("\nStopping.")

    def _send_round(self) -> None:
        """One round of everything: each database in one transaction, as an application would."""
        with transaction.atomic():
            for number in range(ROUND):
                first = self._debit(amount=f"{number + 1}.00")
                self._duplicate(first, f"{number + 1}.00")
                self._debit(amount="5.00", bank_is_down_for_attempts=1 + number % 2)
            for _ in range(TROUBLED):
                self._debit(amount="a lot")  # does not fit the handler: ends in the Troubleshooting Queue
                self._debit(amount="1.00", bank_is_down_for_attempts=99)  # exhausts its attempts: likewise
                self._debit(amount="9000000.00")  # refused by a business rule
        months = [f"2026-{1 + number % 12:02}" for number in range(ROUND)]
        self.batches.append(
            create_batch(
                "reports",
                (BatchCommand("RenderReport", uuid4(), {"month": month}, None, self.run_id) for month in months),
                name="Reports of 2026",
                on_complete=BatchCommand("BindReports", uuid4(), {}, None, self.run_id),
            )
        )
        self.expected += Counter(
            {Status.COMPLETED: 3 * ROUND + 1, Status.IN_TROUBLESHOOTING_QUEUE: 2 * TROUBLED, Status.FAILED: TROUBLED}
        )

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

    def _pay_on_the_web(self) -> None:
        """As another program would: with a key of its own, and twice, for it cannot know what became of the first."""
        deadline = time.monotonic() + PATIENCE
        for number in range(WEB_PAYMENTS):
            key = uuid4()
            request = Request(
                f"http://127.0.0.1:{self.port}/payments/api/",
                json.dumps({"account": "DE-1", "amount": f"{number + 1}.50"}).encode(),
                {"Idempotency-Key": str(key), "Content-Type": "application/json"},
            )
            for _ in range(2):
                self._open(request, deadline)
            self.payments.append(key)

    def _open(self, request: Request, deadline: float) -> None:
        while True:
            _require_running(self.processes)
            try:
                with urlopen(request, timeout=PATIENCE):  # noqa: S310 - our own server
                    return
            except HTTPError as error:
                raise DemoFailedError(f"{request.full_url} answered {error}") from error
            except (URLError, ConnectionError) as error:
                if time.monotonic() > deadline:
                    raise DemoFailedError(f"the web server does not answer: {error}") from error
            time.sleep(0.1)

    def _operate(self) -> None:
        """What somebody does who looks after the Troubleshooting Queue."""
        troubled = Command.objects.troubleshooting("payments").filter(correlation_id=self.run_id).order_by("id")
        mine = {code: [c.command_id for c in troubled if c.last_error_code == code] for code in TROUBLES}
        invalid, exhausted = mine["INVALID_DATA"], mine["BANK_DOWN"]
        edits = {command_id: {"account": "DE-1", "amount": "2.00"} for command_id in [*invalid[:2], *exhausted[:3]]}
        edited = ops.operator_edit_many("payments", edits, operator="demo", reason="to show how")
        reason = "nobody knows how much that is"
        call_command("commandbus_tsq", "cancel", "payments", str(invalid[2]), "--reason", reason, stdout=self.out)
        ops.operator_complete("payments", invalid[3], {"booked": "by hand"}, operator="demo")
        late = ops.operator_retry_many("payments", [invalid[3]], operator="demo")
        self._check("commands that an operator edited", len(edited.done), EDITED)
        self._check("refusals for an operator who was late", late.refused, {invalid[3]: "its status is COMPLETED"})
        self.expected += Counter({Status.COMPLETED: EDITED + 1, Status.CANCELED: 1})
        self.expected[Status.IN_TROUBLESHOOTING_QUEUE] -= EDITED + 2

    def _wait_for_payouts(self) -> None:
        while not self._tell_of_payouts():
            _require_running(self.processes)
            time.sleep(0.2)

    def _tell_of_payouts(self) -> bool:
        """Say what Spark has done, once it has. Answers whether it was said."""
        if self.payouts is not None and (told := self.payouts.ended()):
            self._say(told)
            self.expected[Status.COMPLETED] += payouts.ROWS
            self.payouts = None
        return self.payouts is None

    def _wait_until_ended(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while self._is_busy():
            counts = self._counts()
            self._status_line(counts)
            _require_running(self.processes)
            if time.monotonic() > deadline:
                raise DemoFailedError(f"not everything ended within {PATIENCE} seconds: {dict(counts)}")
            time.sleep(0.5)
        self._status_line(self._counts())
        self._say("")

    def _is_busy(self) -> bool:
        counts = self._counts()
        resolved = sum(count for status, count in counts.items() if status in TERMINAL)
        reports = Command.objects.using(self.reports).filter(domain="reports", correlation_id=self.run_id).count()
        return (
            any(counts[status] for status in LIVE)
            or self._handled_replies() < resolved - reports
            or Payment.objects.filter(id__in=self.payments, outcome=None).exists()
            or not all(batch.is_complete for batch in self._batches())
            or not payouts.summaries(self.run_id)
        )

    def _batches(self) -> list[BatchMetadata]:
        return Batch.objects.using(self.reports).filter(batch_id__in=self.batches).as_they_are()

    def _stay(self) -> None:
        self._say("Sending more every few seconds. Ctrl-C ends it. In another terminal, look at it:")
        self._say("  .venv/bin/python manage.py commandbus_status --watch")
        self._say("  .venv/bin/python manage.py commandbus_tsq list payments")
        next_round = time.monotonic() + 5
        while True:
            _require_running(self.processes)
            self._tell_of_payouts()
            if time.monotonic() > next_round:
                self._send_round()
                next_round = time.monotonic() + random.uniform(5, 10)  # noqa: S311
            self._status_line(self._counts())
            time.sleep(1)

    def _report(self) -> None:
        statuses = self._counts()
        ids = [command.command_id for command in self._commands()]
        audit = Counter(event for using in self._databases() for event in _events(using, ids))
        replies = Counter(command.reply["outcome"] for command in self._commands() if command.reply is not None)
        handled = self._handled_replies()
        entries = Entry.objects.filter(command_id__in=ids).count()
        reports = Report.objects.using(self.reports).filter(command_id__in=ids).count()
        paid = Payment.objects.filter(id__in=self.payments, outcome="SUCCESS").count()
        self._say("")
        for title, counts in (("Status", statuses), ("Audit event", audit), ("Reply", replies)):
            self._say(f"{title:<40}{'count':>8}")
            for name, count in sorted(counts.items()):
                self._say(f"  {name:<38}{count:>8}")
        for what, count in (
            ("Replies handled", handled),
            ("Duplicates sent, without effect", self.duplicates),
            ("Debits booked", entries),
            ("Payments on the web, each sent twice", paid),
            (f"Reports in the database {self.reports!r}", reports),
            ("Batches of reports", len(self.batches)),
        ):
            self._say(f"{what:<40}{count:>8}")
        self._check("statuses", {k: v for k, v in statuses.items() if v}, {k: v for k, v in self.expected.items() if v})
        self._check("commands", len(ids), sum(self.expected.values()))
        self._check("SENT events", audit["SENT"], len(ids))
        self._check("COMPLETED events", audit["COMPLETED"], statuses[Status.COMPLETED] - audit["OPERATOR_COMPLETE"])
        self._check("FAILED events", audit["FAILED"], statuses[Status.FAILED])
        self._check("OPERATOR_EDIT events", audit["OPERATOR_EDIT"], EDITED)
        self._check(
            "events for the Troubleshooting Queue",
            audit["MOVED_TO_TROUBLESHOOTING_QUEUE"] - audit["OPERATOR_RETRY"],
            statuses[Status.IN_TROUBLESHOOTING_QUEUE] + audit["OPERATOR_CANCEL"] + audit["OPERATOR_COMPLETE"],
        )
        self._check("SUCCESS replies", replies["SUCCESS"], statuses[Status.COMPLETED])
        self._check("FAILED replies", replies["FAILED"], statuses[Status.FAILED])
        self._check("CANCELED replies", replies["CANCELED"], statuses[Status.CANCELED])
        self._check("replies handled", handled, sum(replies.values()) - reports)
        self._check("debits booked", entries, 2 * ROUND + EDITED + payouts.ROWS)
        self._check("payments on the web", paid, WEB_PAYMENTS)
        self._check("reports", reports, ROUND + 1)
        counted = [(batch.status, batch.completed_count, batch.total_count) for batch in self._batches()]
        self._check("batches", counted, [(BatchStatus.COMPLETED, ROUND, ROUND)])
        sent = Command.objects.filter(correlation_id=self.run_id, batch_id__isnull=False, domain="payments").count()
        self._check("commands of Spark's batch", sent, payouts.ROWS)
        done = f"{payouts.NAME}: {payouts.ROWS} of {payouts.ROWS} payouts are done"
        self._check("summaries of it", payouts.summaries(self.run_id), [{"summary": done}])
        self._say("It adds up.\n")
        call_command("commandbus_status", stdout=self.out)

    def _check(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            raise DemoFailedError(f"{what} do not add up: expected {expected}, found {found}")

    @property
    def reports(self) -> str:
        return conf.current().database_of("reports")

    def _databases(self) -> set[str]:
        return {"default", self.reports}

    def _commands(self) -> list[Command]:
        """Those of this run. The handling of their replies has the same correlation id."""
        mine = {"correlation_id": self.run_id, "domain__in": ["payments", "reports"]}
        return [command for using in self._databases() for command in Command.objects.using(using).filter(**mine)]

    def _handled_replies(self) -> int:
        handled = Command.objects.filter(domain="payments__replies", correlation_id=self.run_id)
        return handled.filter(status="COMPLETED").count()

    def _counts(self) -> Counter[str]:
        return Counter(command.status for command in self._commands())

    def _status_line(self, counts: Counter[str]) -> None:
        shown = {
            "sent": sum(counts.values()),
            "waiting": sum(counts[status] for status in LIVE),
            "completed": counts[Status.COMPLETED],
            "failed": counts[Status.FAILED],
            "canceled": counts[Status.CANCELED],
            "troubleshooting": counts[Status.IN_TROUBLESHOOTING_QUEUE],
        }
        line = "  ".join(f"{name} {count}" for name, count in shown.items())
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


def _events(using: str, ids: list[UUID]) -> list[str]:
    return list(Audit.objects.using(using).filter(command_id__in=ids).values_list("event_type", flat=True))


def _folder() -> Path:
    """Where the demo's processes have their logs."""
    folder = CHECKOUT / "build" / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _process(name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child of ours with a log file of its own. It ends with us, even if we are killed."""
    with (_folder() / f"{name}.log").open("wb") as log:
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
            raise DemoFailedError(f"'manage.py {name}' ended with {process.returncode}; its log is in {_folder()}")


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


@contextmanager
def _reserved_port(first: int) -> Iterator[int]:
    """A port that nobody listens on, and that no other demo chooses: each holds the UDP port of this number."""
    for port in range(first, first + 100):
        with socket.socket() as probe, socket.socket(type=socket.SOCK_DGRAM) as reservation:
            try:
                reservation.bind(("127.0.0.1", port))
            except OSError:
                continue
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                yield port
                return
    raise DemoFailedError(f"no free port from {first} to {first + 99}")
