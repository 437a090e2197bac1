from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.counter import FOLDER, Counter, Tally


def test_the_tally_adds_up_what_threads_and_processes_have_handled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    counter, tally = Counter(), Tally(tmp_path)
    assert (tally.total(), tally.processes()) == (0, [])
    before = time.monotonic()

    def handle() -> None:
        for _ in range(1000):
            counter.handled()

    threads = [threading.Thread(target=handle) for _ in range(4)]
    for thread in threads:
        thread.start()
    code = "from benchmarks.counter import Counter; Counter().handled(500)"
    root = Path(__file__).parent.parent.parent
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env={**os.environ, FOLDER: str(tmp_path)})
    seen = [tally.total()]
    while any(thread.is_alive() for thread in threads):
        seen.append(tally.total())
    assert tally.total() == 4500
    assert seen == sorted(seen)  # never a count that is half written
    assert before < tally.last_started_at() <= time.monotonic()
    assert os.getpid() in tally.processes()
