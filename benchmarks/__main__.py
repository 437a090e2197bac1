"""python -m benchmarks [--only work_io] [--repetitions 3] [--scale 0.01]"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.bench import RESULTS, Bench
from benchmarks.report import comparisons, figures
from benchmarks.scenarios import BY_DEFAULT, SCENARIOS
from benchmarks.server import Postgres


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="commandbus and its peers side by side")
    parser.add_argument("--only", action="append", choices=list(SCENARIOS), help="this scenario alone; can be repeated")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of all counts: 0.01 shows that it runs, no more")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures are kept")
    arguments = parser.parse_args()
    with Postgres() as postgres:
        bench = Bench(postgres, repetitions=arguments.repetitions, scale=arguments.scale)
        for name in arguments.only or BY_DEFAULT:
            with bench.scenario(name):
                SCENARIOS[name](bench)
            bench.save(arguments.results)  # each is complete in itself
    print(figures(bench.results), comparisons(bench.results), sep="\n\n")  # noqa: T201 - it is what was asked for


if __name__ == "__main__":
    main()
