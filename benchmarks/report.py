"""The results as a table, on the screen and in the README: python -m benchmarks.report"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.bench import RESULTS

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- benchmark -->", "<!-- /benchmark -->"

# Key of the ratio: what it means, and whether it shall be at least or at most what was aimed at.
GOALS: dict[str, tuple[str, str, float]] = {
    "send_bulk_vs_raw": ("send 100,000 at once, against PGMQ's `send_batch`", "≥", 0.5),
    "send_single_vs_pgqueuer": ("send one per transaction, against PgQueuer", "≥", 1.2),
    "work_io_vs_raw": ("work off no-ops, against PGMQ's `read` and `delete`", "≥", 0.6),
    "work_io_vs_pgqueuer": ("… against PgQueuer", "≥", 1.5),
    "work_io_vs_dramatiq": ("… against Dramatiq on Redis", "≥", 3),
    "work_default_vs_pgbench": (
        "one INSERT each, effects exactly once, against bare transactions of pgbench",
        "≥",
        0.6,
    ),
    "work_bulk_vs_work_io": ("bulk handler, 500 at a time, with an INSERT … SELECT, against no-ops", "≥", 1),
    "latency_p50_vs_pgqueuer": ("from commit to an idle worker's handler (median), against PgQueuer", "≤", 1),
    "latency_p50_vs_procrastinate": ("… against procrastinate", "≤", 1),
    "notify_on_vs_off": ("8 senders with NOTIFY, against without", "≥", 0.95),
    "history_5m_vs_none": ("no-ops with 5,000,000 commands of history, against none", "≥", 0.9),
    "executors_64_vs_best": ("no-ops with 64 executors, against the best of 1, 4, 16 and 64", "≥", 0.85),
    "held_snapshot_vs_none": ("no-ops beside a transaction that stays open, against without", "≥", 0.6),
    "memory_200k_vs_20k": ("a worker's memory after 200,000 commands, against after 20,000", "≤", 1.1),
}


def table(results: dict[str, Any]) -> str:
    """In Markdown."""
    lines = ["| | ratio | goal |", "|---|---:|---:|"]
    for key, (meaning, relation, goal) in GOALS.items():
        ratio = results["ratios"].get(key)
        if ratio is not None:
            lines.append(f"| {meaning} | {ratio:.2f} × | {relation} {goal:g} × |")
    lines += ["", "| | | median |", "|---|---|---:|"]
    for scenario, figures in sorted(results["figures"].items()):
        for side, entry in figures["sides"].items():
            lines.append(f"| {scenario} | {side} | {_number(entry['median'])} {_unit(entry['unit'])} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _unit(unit: str) -> str:
    return "/s" if unit == "per second" else unit


def main() -> None:
    if not RESULTS.exists():
        sys.exit("there are no results yet: run make bench first")
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or not after:
        sys.exit(f"{README.name} has no place for the table: a line {BEGIN} and a line {END}")
    README.write_text(f"{before}{BEGIN}\n{table(json.loads(RESULTS.read_text()))}\n{END}{after}")


if __name__ == "__main__":
    main()
