"""A real Spark cluster on this machine: a standalone master and two workers, each with an address of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pyspark

HOSTS = ("127.0.0.1", "127.0.0.2")
"""Spark runs a second attempt of a task on another host only."""
PATIENCE = 90.0
NEEDED = ("psycopg", "psycopg_binary", "psycopg_binary.libs", "typing_extensions.py", "pyarrow", "pyarrow.libs")
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"


@dataclass(frozen=True)
class Cluster:
    master: str
    folder: Path

    def python(self) -> str:
        """A Python with what an executor needs, and nothing else: no commandbus, no Django."""
        home = self.folder / "python"
        if not home.exists():
            venv.create(home, with_pip=False)
            [packages] = home.glob("lib/python*/site-packages")
            for name in NEEDED:
                for found in Path(psycopg.__file__).parents[1].glob(name):
                    (packages / found.name).symlink_to(found)
        return str(home / "bin" / "python")

    def executors(self) -> list[int]:
        """The processes of the executors that run now."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    command = (entry / "cmdline").read_bytes()
                    place = (entry / "cwd").readlink()
                except OSError:  # it has just ended
                    continue
                if b"CoarseGrainedExecutorBackend" in command and self.folder in place.parents:
                    found.append(int(entry.name))
        return found


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    port = _free_port()
    master = f"spark://{HOSTS[0]}:{port}"
    with ExitStack() as processes:
        processes.enter_context(
            _process(
                folder / "master.log",
                "org.apache.spark.deploy.master.Master",
                *("--host", HOSTS[0], "--port", str(port), "--webui-port", "0"),
            )
        )
        _wait_for("Starting Spark master", folder / "master.log")
        for number, host in enumerate(HOSTS):
            processes.enter_context(
                _process(
                    folder / f"worker{number}.log",
                    "org.apache.spark.deploy.worker.Worker",
                    *("--host", host, "--cores", "2", "--memory", "2g", "--webui-port", "0"),
                    *("--work-dir", str(folder / f"work{number}"), master),
                )
            )
        for number in range(len(HOSTS)):
            _wait_for("Successfully registered with master", folder / f"worker{number}.log")
        yield Cluster(master, folder)


@contextmanager
def _process(log: Path, main: str, *arguments: str) -> Iterator[None]:
    """A process and all that it starts, which end with the block."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTHONPATH"))},
        "SPARK_NO_DAEMONIZE": "1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_MEMORY": "256m",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [SPARK_CLASS, main, *arguments], stdout=out, stderr=out, env=environment, start_new_session=True
        )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_for(text: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while text not in log.read_text(errors="replace"):
        assert time.monotonic() < deadline, f"{text!r} did not come: {log.read_text(errors='replace')[-2000:]}"
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOSTS[0], 0))
        return int(probe.getsockname()[1])
