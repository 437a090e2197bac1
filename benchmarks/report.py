"""The results as tables: on the screen, and in the README by python -m benchmarks.report"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import RESULTS

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- benchmark -->", "<!-- /benchmark -->"


@dataclass(frozen=True)
class Comparison:
    key: str
    """Of the ratio."""
    meaning: str
    scenario: str
    side: str
    other: str
    goal: str


COMPARISONS = (
    Comparison("send_bulk_vs_raw", "send 100,000 at once", "send_bulk", "commandbus", "raw PGMQ", "≥ 0.5"),
    Comparison("send_single_vs_pgqueuer", "send one by one", "send_single", "commandbus", "PgQueuer", "≥ 1.2"),
    Comparison("work_io_vs_raw", "work off no-ops", "work_io", "commandbus", "raw PGMQ", "≥ 0.6"),
    Comparison("work_io_vs_pgqueuer", "", "work_io", "commandbus", "PgQueuer", "≥ 1.5"),
    Comparison("work_io_vs_dramatiq", "", "work_io", "commandbus", "Dramatiq + Redis", "≥ 3"),
    Comparison(
        "work_default_vs_pgbench",
        "one INSERT each, effects exactly once",
        "work_default",
        "commandbus, 2 clients",
        "pgbench, 2 clients",
        "≥ 0.6",
    ),
    Comparison("work_bulk_vs_work_io", "500 at a time with one INSERT", "work_bulk", "work_bulk", "work_io", "≥ 1"),
    Comparison("batch_io_vs_none", "no-ops, all of one batch", "batch_io", "one batch", "no batch", "≥ 0.9"),
    Comparison(
        "batch_default_vs_none", "one INSERT each, all of one batch", "batch_default", "one batch", "no batch", "≥ 0.9"
    ),
    Comparison("send_batch_vs_none", "send 100,000 as one batch", "send_batch", "one batch", "no batch", "–"),
    Comparison(
        "latency_p50_vs_pgqueuer",
        "commit to handler, idle worker, median",
        "latency",
        "commandbus p50",
        "PgQueuer p50",
        "≤ 1",
    ),
    Comparison("latency_p50_vs_procrastinate", "", "latency", "commandbus p50", "procrastinate p50", "≤ 1"),
    Comparison("notify_on_vs_off", "8 send at once", "notify", "NOTIFY on", "NOTIFY off", "≥ 0.95"),
    Comparison("history_5m_vs_none", "no-ops after a history of commands", "history", "5,000,000", "none", "≥ 0.9"),
    Comparison("executors_64_vs_best", "no-ops, many executors", "executors", "64 executors", "best of four", "≥ 0.85"),
    Comparison(
        "held_snapshot_vs_none",
        "no-ops beside a long transaction",
        "held_snapshot",
        "held snapshot",
        "no snapshot",
        "≥ 0.6",
    ),
    Comparison("memory_200k_vs_20k", "a worker's memory", "memory", "after 200,000", "after 20,000", "≤ 1.1"),
    Comparison(
        "spark_send_vs_bulk",
        "send 1,000,000 through Spark",
        "spark_send",
        "Spark, 2 connections",
        "commandbus, 2 connections",
        "≥ 0.6",
    ),
    Comparison("spark_send_1_core_vs_bulk", "", "spark_send", "Spark, 1 connection", "commandbus, 1 connection", "–"),
    Comparison(
        "spark_memory_1m_vs_100k",
        "the memory of Spark's Python workers",
        "spark_memory",
        "after 1,000,000",
        "after 100,000",
        "≤ 1.2",
    ),
)


def comparisons(results: dict[str, Any]) -> str:
    """What was compared, as a table in Markdown."""
    lines = ["| | | compared with | ratio | goal |", "|---|---|---|---:|---:|"]
    for one in COMPARISONS:
        if one.key in results["ratios"]:
            sides = results["figures"][one.scenario]["sides"]
            ratio = results["ratios"][one.key]
            ours, other = _figure(sides, one.side), _figure(sides, one.other)
            lines.append(f"| {one.meaning} | {ours} | {other} | **{ratio:.2f}** | {one.goal} |")
    return "\n".join(lines)


def figures(results: dict[str, Any]) -> str:
    """Every median there is."""
    lines = ["| | | median |", "|---|---|---:|"]
    for scenario, found in sorted(results["figures"].items()):
        lines += [f"| {scenario} | {side} | {_value(entry)} |" for side, entry in found["sides"].items()]
    return "\n".join(lines)


def _figure(sides: dict[str, Any], side: str) -> str:
    return f"{side}: {_value(sides[side])}" if side in sides else side


def _value(entry: dict[str, Any]) -> str:
    value = float(entry["median"])
    number = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    return f"{number}/s" if entry["unit"] == "per second" else f"{number} {entry['unit']}"


def main() -> None:
    if not RESULTS.exists():
        sys.exit("there are no results yet: run make bench first")
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        sys.exit(f"{README.name} has no place for the table: a line {BEGIN} and a line {END}")
    README.write_text(f"{before}{BEGIN}\n{comparisons(json.loads(RESULTS.read_text()))}\n{END}{after}")


if __name__ == "__main__":
    main()
