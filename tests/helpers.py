from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import psycopg
from django.db import connection, connections
from psycopg import sql

from commandbus import conf, get_command, send_command
from commandbus.handlers import Handler, HandlerRegistry, registry
from commandbus.models import Command
from commandbus.pgmq import PgmqClient
from commandbus.worker.alarm import Alarm
from commandbus.worker.options import WorkerOptions
from commandbus.worker.worker import Worker

PATIENCE = 30.0
BOTH = ["default", "second"]
"""The databases. All domains live on the first but "archive"."""

WAITING_SESSIONS = """
    SELECT count(*) FROM pg_locks
    WHERE NOT granted AND pid IN (
        SELECT pid FROM pg_locks WHERE database = (SELECT oid FROM pg_database WHERE datname = current_database()))
"""
"""In this database: other tests may run beside this one, in other databases of the server."""


@contextmanager
def listening(using: str, channels: list[str]) -> Iterator[threading.Event]:
    """An event that is set by every notification on one of the channels. Its thread is gone afterwards."""
    ready, heard, ended = threading.Event(), threading.Event(), threading.Event()

    def listen() -> None:
        alarm = Alarm({using: channels})
        try:
            while not ended.is_set():
                alarm.listen()
                ready.set()
                if alarm.wait(0.05):
                    alarm.clear()
                    heard.set()
        finally:
            alarm.close()
            connections.close_all()

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    wait_until(ready.is_set)
    try:
        yield heard
    finally:
        ended.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], Any], what: str = "the condition") -> None:
    """Wait for something that will happen. The limit is for a broken build only: no test depends on the time."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true in {PATIENCE} seconds"
        time.sleep(0.02)


def send(command_type: str = "PlaceOrder", **data: Any) -> UUID:
    return send_command("orders", command_type, uuid4(), data)


def keep(command_type: str = "KeepOrder", **data: Any) -> UUID:
    """To the domain on the second database."""
    return send_command("archive", command_type, uuid4(), data)


def status(command_id: UUID, domain: str = "orders") -> str:
    return reload(command_id, domain).status


def reload(command_id: UUID, domain: str = "orders") -> Command:
    command = get_command(domain, command_id)
    assert command is not None
    return command


def result(command_id: UUID, domain: str = "orders") -> Any:
    reply = reload(command_id, domain).reply
    assert reply is not None
    return reply["data"]


def replies(domain: str = "orders") -> list[dict[str, Any]]:
    client = PgmqClient(conf.current().database_of(domain))
    return [message.message for message in client.read(f"{domain}__replies", vt=0, qty=100_000)]


def send_many(domain: str, command_type: str, count: int) -> None:
    """Many new commands in one call and one round trip."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT commandbus.send(%(domain)s, ARRAY(SELECT gen_random_uuid() FROM generate_series(1, %(count)s)),"
            " array_fill(%(type)s::text, ARRAY[%(count)s]), array_fill('{}'::jsonb, ARRAY[%(count)s]))",
            {"domain": domain, "type": command_type, "count": count},
        )


def rows_read(table: str) -> int:
    """Rows of a table that this transaction has read so far, by whatever scan."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables WHERE relid = %s::regclass",
            [table],
        )
        return int(cursor.fetchone()[0])


@contextmanager
def running_worker(handlers: HandlerRegistry = registry, quick: str = "", **options: Any) -> Iterator[Worker]:
    """A worker in this process; its threads are gone afterwards. It believes that commands of the type `quick` are."""
    defaults: dict[str, Any] = {"domains": ("orders",), "concurrency": 2, "poll_interval": 0.05, "name": "tester"}
    worker = Worker(WorkerOptions(**{**defaults, **options}), handlers)
    if quick:
        worker._backlog._seconds[quick] = (0.0001, time.monotonic())

    def run() -> None:
        try:
            worker.run()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def environment(**changes: str) -> dict[str, str]:
    """The environment of a process that uses the test databases."""
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        **changes,
    }


def unmeasured(variables: Mapping[str, str]) -> dict[str, str]:
    """For processes that start a Spark: it kills the Pythons that it has started, and half a report is none."""
    return {name: value for name, value in variables.items() if not name.startswith("COVERAGE")}


class Barrier:
    """Holds up every handler that was sent `barrier=key`, until it is opened."""

    def __init__(self, key: int, using: str) -> None:
        self.key = key
        self._connection = psycopg.connect(**libpq_parameters(using), autocommit=True)
        self._connection.execute("SELECT pg_advisory_lock(%s)", [key])

    def arrived(self) -> int:
        """How many wait. Our keys are small, so that PostgreSQL shows them in `objid`."""
        row = self._connection.execute(
            f"{WAITING_SESSIONS} AND locktype = 'advisory' AND objid = %s", [self.key]
        ).fetchone()
        assert row is not None
        return int(row[0])

    def open(self) -> None:
        self._connection.close()


@contextmanager
def barrier(key: int = 1, using: str = "default") -> Iterator[Barrier]:
    """In the database of the handlers that it shall hold up."""
    gate = Barrier(key, using)
    try:
        yield gate
    finally:
        gate.open()


def libpq_parameters(using: str = "default") -> dict[str, Any]:
    parameters = connections[using].get_connection_params()
    return {name: parameters[name] for name in ("dbname", "user", "host", "port", "password") if name in parameters}


@contextmanager
def unreachable(using: str) -> Iterator[None]:
    """Every session of this database is ended, and nobody gets another."""
    name = connections[using].settings_dict["NAME"]
    allow = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
    connections[using].close()
    with psycopg.connect(**{**libpq_parameters(using), "dbname": "postgres"}, autocommit=True) as admin:
        admin.execute(allow.format(sql.Identifier(name), sql.Literal(False)))
        try:
            admin.execute("SELECT pg_terminate_backend(pid, 3000) FROM pg_stat_activity WHERE datname = %s", [name])
            yield
        finally:
            admin.execute(allow.format(sql.Identifier(name), sql.Literal(True)))


class WorkerProcess(subprocess.Popen[bytes]):
    """`manage.py commandbus_worker …` as a process of its own. Its output goes to a file: a full pipe would stop it."""

    def __init__(self, *arguments: str, **changes: str) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by worker_process
        super().__init__(
            [sys.executable, "-m", "django", "commandbus_worker", *arguments],
            env=environment(**changes),
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def output(self) -> str:
        """What it has written so far."""
        return os.pread(self.log.fileno(), 1_000_000, 0).decode()  # not read(): it writes where that has ended

    def signal_all(self, number: int) -> None:
        """To it and all its children."""
        os.killpg(self.pid, number)

    def end(self, number: int = signal.SIGTERM) -> str:
        """Ask it to end, wait for that, and answer what it has written."""
        if self.poll() is None:
            self.send_signal(number)
        try:
            self.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.signal_all(signal.SIGKILL)
            self.wait()
        return self.output()


@contextmanager
def worker_process(*arguments: str, **changes: str) -> Iterator[WorkerProcess]:
    process = WorkerProcess(*arguments, **changes)
    try:
        yield process
    finally:
        sys.stdout.write(process.end())  # pytest shows it when the test has failed
        process.log.close()


def registry_with(function: Any, **options: Any) -> HandlerRegistry:
    handlers = HandlerRegistry()
    handlers.register(Handler("orders", "Test", function, **options))
    return handlers
