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


@dataclass(frozen=True, eq=False)
class System:
    name: str
    module: str
    python: Path = Path(sys.executable)
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def is_installed(self) -> bool:
        return self.python.exists()

    def call(self, verb: str, url: str, count: int | None = None, *, counters: Path | None = None) -> Any:
        """What the verb answers. `counters`: the folder of those of a worker."""
        process = self._start(verb, url, "--count", str(count or 0), environment={FOLDER: str(counters)})
        try:
            return self._answer(process)
        finally:
            _end(process)

    def send(self, verb: str, url: str, count: int) -> float:
        """How many per second."""
        answer = self.call(verb, url, count)
        return count / float(answer["ended_at"] - answer["started_at"])

    def send_at_once(self, url: str, count: int, senders: int, verb: str = "send_single") -> float:
        """How many per second, if several processes send as many each at the same time."""
        start_at = time.monotonic() + 1 + senders / 2 + count / 100_000  # a hundredth of them is the warm-up
        words = ["--count", str(count), "--start-at", str(start_at)]
        processes = [self._start(verb, url, *words) for _ in range(senders)]
        try:
            answers = [self._answer(process) for process in processes]
        finally:
            for process in processes:
                _end(process)
        if any(answer["started_at"] > start_at + 0.5 for answer in answers):
            raise BenchmarkError(f"{self.name}: the senders were not ready at the same time")
        return count * senders / (max(float(answer["ended_at"]) for answer in answers) - start_at)

    @contextmanager
    def working(self, url: str) -> Iterator[Tally]:
        with tempfile.TemporaryDirectory() as folder:
            worker = self._start("work", url, environment={FOLDER: folder})
            try:
                yield Tally(Path(folder))
            except TimeoutError as error:
                raise BenchmarkError(f"{self.name}: {error}") from error
            finally:
                _end(worker)

    def drain(self, url: str, warm_up: int) -> float:
        """Let workers empty a queue that is full. Jobs per second, from the end of the warm-up to that of the last."""
        jobs = int(self.call("remaining", url)["remaining"])
        watch = self._start("await_empty", url, stdin=subprocess.PIPE)
        try:
            with self.working(url) as tally:
                warm_at, warm = wait_for(tally, warm_up)
                wait_for(tally, jobs)
                # Every handler was called. The rest is for the system to know it.
                ended_at = self._answer(watch, "now\n")["ended_at"]
        finally:
            _end(watch)
        if warm == jobs:
            raise BenchmarkError(f"{self.name}: {jobs} jobs are too few to measure")
        return (jobs - warm) / (float(ended_at) - warm_at)

    def _start(
        self, verb: str, url: str, *words: str, environment: Mapping[str, str] | None = None, stdin: int | None = None
    ) -> subprocess.Popen[str]:
        options = ["--url", url, "--options", json.dumps(dict(self.options))]
        return subprocess.Popen(
            [str(self.python), "-m", self.module, verb, *options, *words],
            cwd=CHECKOUT,
            env={**os.environ, **self.environment, **(environment or {})},
            stdin=stdin or subprocess.DEVNULL,
            stdout=subprocess.PIPE if verb != "work" else subprocess.DEVNULL,
            stderr=subprocess.PIPE if verb != "work" else subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def _answer(self, process: subprocess.Popen[str], question: str | None = None) -> Any:
        output, errors = process.communicate(question, timeout=PATIENCE)
        if process.returncode:
            raise BenchmarkError(f"{self.name}: {errors[-2000:]}")
        return json.loads(output.splitlines()[-1]) if output.strip() else None


def wait_for(tally: Tally, jobs: int) -> tuple[float, int]:
    """When that many were handled, and how many it were by then."""
    deadline = time.monotonic() + PATIENCE
    while (handled := tally.total()) < jobs:
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {handled} of {jobs} jobs were handled in {PATIENCE} seconds")
        time.sleep(0.005)
    return time.monotonic(), handled


def _end(process: subprocess.Popen[str]) -> None:
    """With all that it has started."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
