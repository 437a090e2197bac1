"""The servers that the benchmark measures on. They belong to it alone, and end with it."""

from __future__ import annotations

import itertools
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql

from benchmarks.system import System
from commandbus.embedded import EmbeddedPostgres, home_for

DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}


class Postgres:
    """Databases for systems. Each system is installed once, and what it then gets are copies of that."""

    def __init__(self, home: Path | None = None) -> None:
        """`home`: of a server for this run alone; otherwise all runs of this checkout have one, one after the other."""
        self.server = EmbeddedPostgres(home or home_for(Path(__file__).parent), settings=DURABLE)
        self._numbers = itertools.count(1)
        self._templates: dict[str, str] = {}

    def __enter__(self) -> Postgres:
        self.server.start()
        for name in self._names():
            self.drop(name)  # of a run that was killed
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names():
            self.drop(name)
        self.server.release()

    @contextmanager
    def fresh(self, system: System) -> Iterator[str]:
        """The url of a database that has the system in it, and nothing else."""
        name = f"bench_{next(self._numbers)}"
        self._execute("CREATE DATABASE {} TEMPLATE {}", name, self._template(system))
        try:
            yield self.server.url(name)
        finally:
            self.drop(name)

    @contextmanager
    def empty(self) -> Iterator[str]:
        name = f"bench_{next(self._numbers)}"
        self.server.create_database(name)
        try:
            yield self.server.url(name)
        finally:
            self.drop(name)

    def binaries(self) -> Path:
        """Where PostgreSQL's own programs are."""
        return self.server.binaries()

    def version(self) -> str:
        with self._connect() as connection:
            [row] = connection.execute("SHOW server_version").fetchall()
        return str(row[0])

    def settle(self, url: str) -> None:
        """After a database was filled: what autovacuum and the checkpointer would do in the next minutes."""
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")
        self.checkpoint()

    def checkpoint(self) -> None:
        """So that every measurement starts with nothing to be written by others."""
        self._execute("CHECKPOINT")

    def drop(self, name: str) -> None:
        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def _template(self, system: System) -> str:
        name = self._templates.get(system.module)
        if name is None:
            name = f"bench_template_{len(self._templates)}"
            self.server.create_database(name)
            system.call("prepare", self.server.url(name))
            self._templates[system.module] = name
        return name

    def _names(self) -> list[str]:
        with self._connect() as connection:
            rows = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'bench%'").fetchall()
        return [str(row[0]) for row in rows]

    def _execute(self, statement: str, *names: str) -> None:
        with self._connect() as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    def _connect(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(self.server.url("postgres"), autocommit=True)


@contextmanager
def redis() -> Iterator[str]:
    """The url of an empty Redis on loopback that keeps nothing on disk, which is the fastest it has."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise FileNotFoundError("redis-server is not installed: apt-get install redis-server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        _wait_until_open(port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait()


def _wait_until_open(port: int) -> None:
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError("redis-server does not answer")
