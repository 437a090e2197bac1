"""What is measured. Each function is one comparison; everything in it is measured in the same run, in turns."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import LiteralString

import psycopg

from benchmarks.bench import Bench
from benchmarks.history import make_history
from benchmarks.server import redis
from benchmarks.sides import pgbench
from benchmarks.spark import dataset, lack_of_spark, through_spark
from benchmarks.system import PEERS, BenchmarkError, System, wait_for

RAW = System("raw PGMQ", "benchmarks.sides.raw")
PGQUEUER = System("PgQueuer", "benchmarks.peers.pgqueuer", PEERS)
PROCRASTINATE = System("procrastinate", "benchmarks.peers.procrastinate", PEERS)
DRAMATIQ = System("Dramatiq + Redis", "benchmarks.peers.dramatiq_redis", PEERS)
CELERY = System("Celery + Redis", "benchmarks.peers.celery_redis", PEERS)
DJANGO_TASKS = System("django-tasks-db", "benchmarks.peers.django_tasks_db", PEERS)
RELIABLE_CMD = System("reliable-cmd", "benchmarks.peers.reliable_cmd", PEERS)
ON_REDIS = (DRAMATIQ, CELERY)

SENDERS = 8
MEGABYTE = 1024 * 1024


def ours(
    kind: str = "io",
    processes: int = 2,
    concurrency: int = 2,
    notify: str = "after_commit",
    *,
    batch: bool = False,
    random_ids: bool = False,
) -> System:
    options = {"kind": kind, "processes": processes, "concurrency": concurrency}
    options |= {"batch": batch, "random_ids": random_ids}
    return System("commandbus", "benchmarks.sides.ours", options=options, environment={"BENCHMARK_NOTIFY": notify})


OURS = ours()


def send_bulk(bench: Bench) -> None:
    systems = {system.name: system for system in (RAW, OURS)}
    for name in bench.interleaved(list(systems)):
        with bench.database(systems[name]) as url:
            bench.record(name, systems[name].send("fill", url, bench.count(100_000)))
    bench.ratio("send_bulk_vs_raw", bench.median(OURS.name), bench.median(RAW.name))


def send_single(bench: Bench) -> None:
    """Raw PGMQ is measured too: it says how much of our time is the message alone."""
    systems = {system.name: system for system in (OURS, RAW, PGQUEUER) if lack_of(system) is None}
    for name in bench.interleaved(list(systems)):
        with bench.database(systems[name]) as url:
            bench.record(name, systems[name].send("send_single", url, bench.count(3_000)))
    compare(bench, "send_single_vs_pgqueuer", OURS.name, PGQUEUER)


def work_io(bench: Bench) -> None:
    counts = {OURS: 60_000, RAW: 60_000, PGQUEUER: 60_000, DRAMATIQ: 20_000}
    systems = {system.name: system for system in counts if lack_of(system) is None}
    for name in bench.interleaved(list(systems)):
        with place(bench, systems[name]) as url:
            bench.record(name, fill_and_drain(bench, systems[name], url, counts[systems[name]]))
    for key, peer in (("raw", RAW), ("pgqueuer", PGQUEUER), ("dramatiq", DRAMATIQ)):
        compare(bench, f"work_io_vs_{key}", OURS.name, peer)


def work_default(bench: Bench) -> None:
    """With as many clients of pgbench as executors. Two suit us best on two cores; more are measured all the same."""
    systems = {clients: ours("default", concurrency=clients // 2) for clients in (2, 4, 8)}
    sides = [f"{who}, {clients} clients" for clients in systems for who in ("commandbus", "pgbench")]
    for name in bench.interleaved(sides):
        who, clients = name.split(", ")[0], int(name.split()[-2])
        if who == "pgbench":
            bench.record(name, _pgbench(bench, clients))
        else:
            bench.record(name, drain(bench, systems[clients], 30_000))
    bench.ratio("work_default_vs_pgbench", bench.median("commandbus, 2 clients"), bench.median("pgbench, 2 clients"))


def _pgbench(bench: Bench, clients: int) -> float:
    with bench.postgres.empty() as url:
        pgbench.prepare(url)
        bench.postgres.checkpoint()
        seconds = max(1, int(6 * bench.scale))
        return pgbench.transactions_per_second(bench.postgres.binaries(), url, clients, seconds)


def work_bulk(bench: Bench) -> None:
    systems = {"work_bulk": ours("bulk", concurrency=2), "work_io": OURS}
    for name in bench.interleaved(list(systems)):
        bench.record(name, drain(bench, systems[name], 60_000))
    bench.ratio("work_bulk_vs_work_io", bench.median("work_bulk"), bench.median("work_io"))


def batch_io(bench: Bench) -> None:
    _batch(bench, "io")


def batch_default(bench: Bench) -> None:
    _batch(bench, "default")


def _batch(bench: Bench, kind: str) -> None:
    """The same commands, as one batch and without."""
    systems = {name: ours(kind, batch=name == "one batch") for name in ("one batch", "no batch")}
    for name in bench.interleaved(list(systems)):
        bench.record(name, drain(bench, systems[name], 100_000))
    bench.ratio(f"batch_{kind}_vs_none", bench.median("one batch"), bench.median("no batch"))


def send_batch(bench: Bench) -> None:
    systems = {name: ours(batch=name == "one batch") for name in ("one batch", "no batch")}
    for name in bench.interleaved(list(systems)):
        with bench.database(systems[name]) as url:
            bench.record(name, systems[name].send("fill", url, bench.count(100_000)))
    bench.ratio("send_batch_vs_none", bench.median("one batch"), bench.median("no batch"))


def latency(bench: Bench) -> None:
    systems = {system.name: system for system in (OURS, PGQUEUER, PROCRASTINATE) if lack_of(system) is None}
    for name in bench.interleaved(list(systems)):
        system = systems[name]
        with bench.database(system) as url, system.working(url) as tally:
            seconds = system.call("latency", url, bench.count(300), counters=tally.folder)["seconds"]
            bench.record(f"{name} p50", 1000 * statistics.median(seconds), "ms")
            bench.record(f"{name} p99", 1000 * statistics.quantiles(seconds, n=100)[98], "ms")
    for key, peer in (("pgqueuer", PGQUEUER), ("procrastinate", PROCRASTINATE)):
        compare(bench, f"latency_p50_vs_{key}", OURS.name, peer, " p50")


def notify(bench: Bench) -> None:
    """Eight who send, and a worker that is always idle, for its domain is paused: it is woken as often as can be."""
    systems = {"NOTIFY on": ours(notify="after_commit"), "NOTIFY off": ours(notify="off")}
    with bench.database(OURS) as url:
        _execute(url, "SELECT commandbus.pause('bench', true)")
        with OURS.working(url):
            time.sleep(2)
            for name in bench.interleaved(list(systems), times=3):
                bench.record(name, systems[name].send_at_once(url, bench.count(1_000), SENDERS))
    bench.ratio("notify_on_vs_off", bench.median("NOTIFY on"), bench.median("NOTIFY off"))


def history(bench: Bench) -> None:
    past = bench.count(5_000_000)
    with bench.database(OURS) as empty, bench.database(OURS) as full:
        make_history(full, past, lambda made: bench.say(f"  history: {made:,} of {past:,} commands"))
        for name in bench.interleaved(["none", "5,000,000"]):
            url = empty if name == "none" else full
            bench.record(name, fill_and_drain(bench, OURS, url, 60_000))
    bench.ratio("history_5m_vs_none", bench.median("5,000,000"), bench.median("none"))


def executors(bench: Bench) -> None:
    systems = {
        "1 executor": ours(processes=1, concurrency=1),
        **{f"{count} executors": ours(processes=2, concurrency=count // 2) for count in (4, 16, 64)},
    }
    for name in bench.interleaved(list(systems)):
        bench.record(name, drain(bench, systems[name], 40_000))
    best = max(bench.median(name) for name in systems)
    bench.ratio("executors_64_vs_best", bench.median("64 executors"), best)


def held_snapshot(bench: Bench) -> None:
    for name in bench.interleaved(["no snapshot", "held snapshot"]):
        with bench.database(OURS) as url:
            OURS.call("fill", url, bench.count(50_000))
            bench.postgres.settle(url)
            with snapshot(url) if name == "held snapshot" else nullcontext():
                bench.record(name, OURS.drain(url, bench.count(5_000)))
    bench.ratio("held_snapshot_vs_none", bench.median("held snapshot"), bench.median("no snapshot"))


def memory(bench: Bench) -> None:
    system = ours(processes=1)
    early, late = bench.count(20_000), bench.count(200_000)
    for _ in range(bench.repetitions):
        with bench.database(system) as url:
            system.call("fill", url, late)
            bench.postgres.settle(url)
            with system.working(url) as tally:
                for name, handled in (("after 20,000", early), ("after 200,000", late)):
                    wait_for(tally, handled)
                    bench.record(name, sum(map(_resident, tally.processes())) / MEGABYTE, "MiB")
    bench.ratio("memory_200k_vs_20k", bench.median("after 200,000"), bench.median("after 20,000"))


def spark_send(bench: Bench) -> None:
    """As many connections on both sides: each of Spark's cores has one, and so has each process that sends."""
    keys = {"spark_send_vs_bulk": "2 connections", "spark_send_1_core_vs_bulk": "1 connection"}
    lack = lack_of_spark()
    if lack is not None:
        for key in keys:
            bench.missing(key, lack)
        return
    count, system = bench.count(1_000_000), ours(random_ids=True)
    sides = [f"{who}, {connections}" for connections in keys.values() for who in ("Spark", "commandbus")]
    with dataset(count) as folder:
        for name in bench.interleaved(sides):
            who, at_once = name.split(", ")[0], int(name.split()[1])
            if who == "Spark":
                bench.record(name, send_by_spark(bench, folder, count, at_once)["rate"])
            else:
                with bench.database(system) as url:
                    bench.record(name, system.send_at_once(url, count // at_once, at_once, "fill"))
    for key, connections in keys.items():
        bench.ratio(key, bench.median(f"Spark, {connections}"), bench.median(f"commandbus, {connections}"))


def spark_memory(bench: Bench) -> None:
    """Of the largest of Spark's Python workers, and of its Java, which takes what it may have."""
    lack = lack_of_spark()
    if lack is not None:
        bench.missing("spark_memory_1m_vs_100k", lack)
        return
    counts = {"100,000": bench.count(100_000), "1,000,000": bench.count(1_000_000)}
    with ExitStack() as stack:
        folders = {name: stack.enter_context(dataset(count)) for name, count in counts.items()}
        for name in bench.interleaved(list(counts)):
            peaks = send_by_spark(bench, folders[name], counts[name], cores=2)
            bench.record(f"after {name}", peaks["worker"] / MEGABYTE, "MiB")
            bench.record(f"Java after {name}", peaks["java"] / MEGABYTE, "MiB")
    bench.ratio("spark_memory_1m_vs_100k", bench.median("after 1,000,000"), bench.median("after 100,000"))


def send_by_spark(bench: Bench, folder: Path, count: int, cores: int) -> dict[str, float]:
    """How many per second, and the most that its processes have had in memory, in bytes."""
    with bench.database(OURS) as url, bench.database(OURS) as other:
        answer = through_spark(folder, other, cores).call("fill", url, count)
        sent = int(OURS.call("remaining", url)["remaining"])
    if sent != count:
        raise BenchmarkError(f"Spark has sent {sent} of {count} commands")
    rate = count / (answer["ended_at"] - answer["started_at"])
    return {"rate": rate, "worker": answer["worker"], "java": answer["java"]}


def peers(bench: Bench) -> None:
    """Every system there is, with as many jobs as it works off in some seconds."""
    counts = {OURS: 60_000, PGQUEUER: 60_000, DRAMATIQ: 20_000, CELERY: 5_000}
    counts |= {PROCRASTINATE: 5_000, RELIABLE_CMD: 5_000, DJANGO_TASKS: 3_000}
    systems = {system.name: system for system in counts if lack_of(system) is None}
    for name in bench.interleaved(list(systems)):
        system = systems[name]
        count = bench.count(counts[system])
        with place(bench, system) as url:
            bench.record(f"{name}, send one by one", system.send("send_single", url, bench.count(1_000)))
            bench.record(f"{name}, send many", system.send("fill", url, count))
            if system not in ON_REDIS:
                bench.postgres.settle(url)
            bench.record(f"{name}, work", system.drain(url, count // 10))
        with place(bench, system) as url, system.working(url) as tally:
            seconds = system.call("latency", url, bench.count(50), counters=tally.folder)["seconds"]
            bench.record(f"{name}, latency p50", 1000 * statistics.median(seconds), "ms")


SCENARIOS: dict[str, Callable[[Bench], None]] = {
    scenario.__name__: scenario
    for scenario in (
        send_bulk,
        send_single,
        work_io,
        work_default,
        work_bulk,
        batch_io,
        batch_default,
        send_batch,
        latency,
        notify,
        history,
        executors,
        held_snapshot,
        memory,
        spark_send,
        spark_memory,
        peers,
    )
}
BY_DEFAULT = [name for name in SCENARIOS if name != "peers"]


def lack_of(system: System) -> str | None:
    """What is missing to run it."""
    if not system.is_installed():
        return f"{system.name} is not installed: make bench installs it"
    if system in ON_REDIS and shutil.which("redis-server") is None:
        return "redis-server is not installed: apt-get install redis-server"
    return None


def compare(bench: Bench, key: str, side: str, peer: System, what: str = "") -> None:
    """The ratio to a peer, or why there is none."""
    lack = lack_of(peer)
    if lack is None:
        bench.ratio(key, bench.median(side + what), bench.median(peer.name + what))
    else:
        bench.missing(key, lack)


@contextmanager
def place(bench: Bench, system: System) -> Iterator[str]:
    """Where a system keeps its jobs."""
    with redis() if system in ON_REDIS else bench.database(system) as url:
        yield url


def drain(bench: Bench, system: System, count: int) -> float:
    with bench.database(system) as url:
        return fill_and_drain(bench, system, url, count)


def fill_and_drain(bench: Bench, system: System, url: str, count: int) -> float:
    system.call("fill", url, bench.count(count))
    if system not in ON_REDIS:
        bench.postgres.settle(url)
    return system.drain(url, bench.count(count) // 10)


@contextmanager
def snapshot(url: str) -> Iterator[None]:
    """A report that runs for long: nothing that was deleted since can be forgotten."""
    with psycopg.connect(url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM command_bus_domain")
        yield


def _execute(url: str, statement: LiteralString) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096
