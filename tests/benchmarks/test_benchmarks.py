from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scenarios
from benchmarks.bench import Bench
from benchmarks.report import comparisons, figures
from benchmarks.scenarios import compare, send_by_spark
from benchmarks.server import Postgres
from benchmarks.spark import dataset
from benchmarks.system import System
from tests.helpers import unmeasured

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.integration
def test_the_benchmark_runs_and_keeps_what_it_has_measured(tmp_path: Path) -> None:
    """What needs no peer, with few commands: the figures mean nothing, but they are there."""
    results = tmp_path / "results.json"
    before = {
        "ratios": {"send_bulk_vs_raw": 0.1, "memory_200k_vs_20k": 1.0},
        "figures": {"memory": {"sides": {"after 20,000": {"unit": "MiB", "median": 50.0, "values": [50.0]}}}},
    }
    results.write_text(json.dumps(before))
    words = ["--only=send_bulk", "--only=work_bulk", "--only=work_default", "--repetitions=1", "--scale=0.05"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words, "--results", str(results)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kept = json.loads(results.read_text())
    assert set(kept["ratios"]) == {
        "send_bulk_vs_raw",
        "work_bulk_vs_work_io",
        "work_default_vs_pgbench",
        "memory_200k_vs_20k",
    }
    assert kept["ratios"]["send_bulk_vs_raw"] != 0.1
    assert kept["ratios"]["memory_200k_vs_20k"] == 1.0
    assert set(kept["figures"]["send_bulk"]["sides"]) == {"raw PGMQ", "commandbus"}
    assert all(side["median"] > 0 for side in kept["figures"]["work_default"]["sides"].values())
    assert "| send 100,000 at once | commandbus: " in done.stdout


def test_the_tables_show_what_was_measured_and_nothing_else() -> None:
    sides = {
        "raw PGMQ": {"unit": "per second", "median": 25_000.4, "values": []},
        "commandbus": {"unit": "per second", "median": 17_860.2, "values": []},
    }
    results: dict[str, Any] = {"ratios": {"work_io_vs_raw": 0.7144}, "figures": {"work_io": {"sides": sides}}}
    assert comparisons(results).splitlines()[2:] == [
        "| work off no-ops | commandbus: 17,860/s | raw PGMQ: 25,000/s | **0.71** | ≥ 0.6 |"
    ]
    assert figures(results).splitlines()[2:] == [
        "| work_io | raw PGMQ | 25,000/s |",
        "| work_io | commandbus | 17,860/s |",
    ]


def test_a_peer_that_is_not_there_leaves_a_reason_and_no_ratio() -> None:
    bench = Bench(Postgres())
    compare(bench, "work_io_vs_nobody", "commandbus", System("Nobody", "nobody", Path("/nowhere/python")))
    assert bench.results["ratios"] == {}
    assert bench.results["missing"] == {"work_io_vs_nobody": "Nobody is not installed: make bench installs it"}


@pytest.mark.integration
@pytest.mark.spark
def test_spark_sends_a_dataset_and_tells_what_its_workers_have_had_in_memory(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in set(os.environ) - set(unmeasured(os.environ)):
        monkeypatch.delenv(name)
    with Postgres(home) as postgres, dataset(500) as folder:
        measured = send_by_spark(Bench(postgres), folder, 500, cores=2)
    assert measured["rate"] > 0
    assert measured["worker"] > 1024 * 1024
    assert measured["java"] > measured["worker"]


def test_without_spark_there_is_a_reason_and_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "lack_of_spark", lambda: "Spark needs Java")
    bench = Bench(Postgres())
    scenarios.spark_send(bench)
    scenarios.spark_memory(bench)
    keys = ("spark_send_vs_bulk", "spark_send_1_core_vs_bulk", "spark_memory_1m_vs_100k")
    assert bench.results["ratios"] == {}
    assert bench.results["missing"] == dict.fromkeys(keys, "Spark needs Java")
