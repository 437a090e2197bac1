"""One run of the benchmark: where figures are collected, and what scenarios use to make them."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.server import Postgres
from benchmarks.system import System

RESULTS = Path(__file__).parent / "results.json"


class Bench:
    def __init__(self, postgres: Postgres, *, repetitions: int = 3, scale: float = 1.0) -> None:
        """`scale`: of all counts, for a quick look at whether it runs. Its ratios mean nothing."""
        self.postgres = postgres
        self.repetitions = repetitions
        self.scale = scale
        self.results: dict[str, Any] = {"figures": {}, "ratios": {}, "missing": {}}
        self._scenario = ""

    def count(self, commands: int) -> int:
        return max(200, int(commands * self.scale))

    @contextmanager
    def scenario(self, name: str) -> Iterator[None]:
        self._scenario = name
        self.results["figures"][name] = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "sides": {}}
        started = time.monotonic()
        self.say(f"{name} …")
        yield
        self.say(f"{name}: {time.monotonic() - started:.0f} s")

    def interleaved(self, sides: Sequence[str], *, times: int = 1) -> Iterator[str]:
        """Each side in turn, in every repetition, and every other time in the opposite order.

        `times` as often, where the difference is smaller than what two runs of the same differ by.
        """
        for repetition in range(times * self.repetitions):
            yield from sides if repetition % 2 == 0 else reversed(sides)

    @contextmanager
    def database(self, system: System) -> Iterator[str]:
        with self.postgres.fresh(system) as url:
            self.postgres.checkpoint()
            yield url

    def record(self, side: str, value: float, unit: str = "per second") -> None:
        sides = self.results["figures"][self._scenario]["sides"]
        entry = sides.setdefault(side, {"unit": unit, "values": []})
        entry["values"].append(round(value, 6))
        entry["median"] = statistics.median(entry["values"])
        self.say(f"  {side:<28} {value:>12,.4g} {unit}")

    def median(self, side: str) -> float:
        return float(self.results["figures"][self._scenario]["sides"][side]["median"])

    def ratio(self, key: str, value: float, of: float) -> None:
        self.results["ratios"][key] = round(value / of, 3)
        self.say(f"  {key} = {value / of:.3f}")

    def missing(self, key: str, why: str) -> None:
        self.results["missing"][key] = why
        self.say(f"  {key} is missing: {why}")

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - progress

    def save(self, path: Path) -> None:
        """What was not measured in this run stays as it was: every comparison is complete in itself."""
        kept = json.loads(path.read_text()) if path.exists() else {}
        for part in ("figures", "ratios", "missing"):
            self.results[part] = {**kept.get(part, {}), **self.results[part]}
        for key in self.results["ratios"]:
            self.results["missing"].pop(key, None)
        self.results["machine"] = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "postgresql": self.postgres.version(),
        }
        path.write_text(json.dumps(self.results, indent=2, sort_keys=True) + "\n")
