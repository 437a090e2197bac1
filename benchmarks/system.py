"""A system under measurement, as the benchmark drives it: one process per step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.counter import FOLDER, Tally

CHECKOUT = Path(__file__).resolve().parent.parent
PEERS = CHECKOUT / ".venv-peers" / "bin" / "python"
PATIENCE = 600.0


class BenchmarkError(Exception):
    """A system did not do what it was asked to; the message says which and what it printed."""


@dataclass(frozen=True)
class System:
    name: str
    module: str
    python: Path = Path(sys.executable)
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1
    """How many are started to work, where the system itself starts only one."""

    def call(self, verb: str, url: str, count: int | None = None, **environment: str) -> Any:
        """What the verb answers."""
        done = subprocess.run(
            self._words(verb, url, count),
            cwd=CHECKOUT,
            env={**os.environ, **self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        if done.returncode:
            raise BenchmarkError(f"{self.name} {verb}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else None

    def send(self, verb: str, url: str, count: int) -> float:
        """How many per second."""
        return count / float(self.call(verb, url, count)["seconds"])

    @contextmanager
    def working(self, url: str) -> Iterator[Tally]:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, **self.environment, FOLDER: folder}
            with tempfile.TemporaryFile("w+") as output:
                workers = [
                    subprocess.Popen(
                        self._words("work", url, None),
                        cwd=CHECKOUT,
                        env=environment,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                    for _ in range(self.processes)
                ]
                try:
                    yield Tally(Path(folder))
                except TimeoutError as error:
                    output.seek(0)
                    raise BenchmarkError(f"{self.name}: {error}\n{output.read()[-3000:]}") from error
                finally:
                    for worker in workers:
                        _end(worker)

    def drain(self, url: str, warm_up: int) -> float:
        """Let workers empty a queue that was filled. Jobs per second, from the end of the warm-up to the end of the last."""
        jobs = int(self.call("remaining", url)["remaining"])
        with self.working(url) as tally, self._watching(url) as watch:
            warm_at, warm = wait_for(tally, warm_up)
            wait_for(tally, jobs)
            # Every handler was called. The rest is for the system to know it.
            output, _ = watch.communicate("now\n", timeout=PATIENCE)
        return (jobs - warm) / (json.loads(output)["ended_at"] - warm_at)

    @contextmanager
    def _watching(self, url: str) -> Iterator[subprocess.Popen[str]]:
        watch = subprocess.Popen(
            self._words("await_empty", url, None),
            cwd=CHECKOUT,
            env={**os.environ, **self.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield watch
        finally:
            watch.kill()
            watch.wait()

    def _words(self, verb: str, url: str, count: int | None) -> list[str]:
        words = [str(self.python), "-m", self.module, verb, "--url", url, "--options", json.dumps(dict(self.options))]
        return words if count is None else [*words, "--count", str(count)]


def wait_for(tally: Tally, jobs: int) -> tuple[float, int]:
    """When that many were handled, and how many it were by then."""
    deadline = time.monotonic() + PATIENCE
    while (handled := tally.total()) < jobs:
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {handled} of {jobs} jobs were handled in {PATIENCE} seconds")
        time.sleep(0.005)
    return time.monotonic(), handled


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.terminate()
    try:
        worker.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
