from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from commandbus import nodes, pause_domain, status
from commandbus.embedded import EmbeddedPostgres
from commandbus.models import Domain, Node
from commandbus.shell import monitor
from commandbus.status import Overview
from commandbus.testing.time import advance
from commandbus.transitions import PostgresTransitions
from tests.helpers import BOTH, environment, send, send_many, wait_until
from tests.shell.helpers import Terminal, run

pytestmark = pytest.mark.django_db(databases=BOTH)

BUS = PostgresTransitions("default")


def row(ran_out: str, name: str) -> list[str]:
    [found] = [line for line in ran_out.splitlines() if line.startswith(name)]
    return found.split()


def test_domains_and_nodes_are_aligned_tables() -> None:
    for _ in range(3):
        send()
    node_id = uuid4()
    nodes.register("default", node_id=node_id, name="worker-1", role="worker", domains=["orders"], handled_types={})
    Node.objects.update(host="somewhere", pid=4711)
    BUS.receive("orders", qty=1, vt=30, node_id=node_id)
    advance("orders", 10)
    pause_domain("other")
    ran = run("commandbus_status")
    assert ran.code == 0
    assert ran.lines[0].split() == ["DOMAIN", "WAITING", "DELAYED", "RUNNING", "TROUBLESHOOTING", "REPLIES", "OLDEST"]
    assert row(ran.out, "orders")[:6] == ["orders", "2", "0", "1", "0", "0"]
    assert row(ran.out, "orders")[7] == "s"
    assert row(ran.out, "other") == ["other", "0", "0", "0", "0", "0", "paused"]
    assert row(ran.out, "NODE") == ["NODE", "ROLE", "DOMAINS", "HOST", "PID", "HEARTBEAT", "STATE", "HOLDS"]
    assert row(ran.out, "worker-1") == ["worker-1", "worker", "orders", "somewhere", "4711", "0", "s", "alive", "1"]
    end = ran.lines[0].index("WAITING") + len("WAITING")
    assert [line[end - 2 : end] for line in ran.lines[1:5]] == [" 2", " 0", " 0", " 0"]


def test_only_the_domains_that_were_asked_for() -> None:
    ran = run("commandbus_status", "other", "orders")
    assert [line.split()[0] for line in ran.lines[1:3]] == ["orders", "other"]
    assert "payments" not in ran.out
    assert "no worker runs" in ran.out


def test_counts_that_were_cut_have_a_plus_and_missing_queues_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "AT_MOST", 1000)
    send_many("orders", "PlaceOrder", 1001)
    Domain.objects.filter(name="orders").update(reply_queue="gone")
    assert row(run("commandbus_status", "orders").out, "orders")[:6] == ["orders", "1,000+", "0", "0", "0", "?"]


def test_json_for_machines() -> None:
    send()
    node_id = uuid4()
    nodes.register("default", node_id=node_id, name="worker-1", role="worker", domains=["orders"], handled_types={})
    BUS.receive("orders", qty=1, vt=30, node_id=node_id)
    found = json.loads(run("commandbus_status", "orders", "--json").out)
    [domain], [node] = found["domains"], found["nodes"]
    assert found["away"] == {}
    assert domain == {
        "domain": "orders",
        "database": "default",
        "paused": False,
        "waiting": 0,
        "delayed": 0,
        "running": 1,
        "in_troubleshooting": 0,
        "replies": 0,
        "oldest_ready_seconds": None,
        "more": [],
        "held": {str(node_id): 1},
    }
    assert (node["node_id"], node["state"], node["held"], node["domains"]) == (str(node_id), "alive", 1, ["orders"])


def test_an_unknown_domain_and_a_wrong_interval_are_named() -> None:
    assert "domain 'nowhere' is not registered; known: orders" in run("commandbus_status", "nowhere").err
    assert "above 0, not 0" in run("commandbus_status", "--watch", "0").err


def test_where_nothing_is_registered_it_says_what_to_do() -> None:
    for using in BOTH:
        Domain.objects.using(using).all().delete()
    assert "no domain is registered; run: manage.py migrate" in run("commandbus_status").out


def looking(monkeypatch: pytest.MonkeyPatch, times: int) -> list[float]:
    """Let a watch end in the pause after so many looks, as Ctrl-C would."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == times:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", pause)
    return pauses


def test_watching_a_terminal_clears_and_redraws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = looking(monkeypatch, 3)
    ran = run("commandbus_status", "orders", "--watch", stdout=Terminal())
    assert (ran.code, pauses) == (0, [1, 1, 1])
    assert ran.out.count(monitor.CLEAR) == 3
    assert ran.out.count("DOMAIN") == 3
    assert "every 1 s, Ctrl-C ends" in ran.out


def test_elsewhere_it_prints_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looking(monkeypatch, 2) == []
    ran = run("commandbus_status", "orders", "--watch", "2.5", "--json")
    assert [json.loads(line)["domains"][0]["domain"] for line in ran.lines] == ["orders", "orders"]
    assert "\033" not in ran.out


def fake(*seen: Overview) -> Callable[[Any], Overview]:
    following = iter(seen)
    return lambda _: next(following)


def test_a_database_that_is_away_is_shown_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    [orders] = status.domain_statuses(["orders"])
    away = Overview(domains=[orders], nodes=[], away={"second": "connection \x1brefused"})
    monkeypatch.setattr(monitor, "overview", fake(away))
    ran = run("commandbus_status")
    assert ran.code == 1
    assert ran.lines[:2] == ["database 'second' is away: connection \\x1brefused", ""]
    assert row(ran.out, "orders")


def test_watching_survives_a_database_that_is_away_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    looking(monkeypatch, 3)
    there, gone = status.overview(["orders"]), Overview(domains=[], nodes=[], away={"default": "refused"})
    monkeypatch.setattr(monitor, "overview", fake(there, gone, there))
    ran = run("commandbus_status", "--watch")
    assert ran.code == 0
    first, second, third = ran.out.split("every 1 s")[1:]
    assert "WAITING" in first
    assert "database 'default' is away: refused" in second
    assert "registered" not in second
    assert "no worker runs" not in second
    assert "WAITING" in third


def test_a_real_watch_outlives_a_restart_of_postgresql_and_ends_with_ctrl_c(home: Path, tmp_path: Path) -> None:
    with EmbeddedPostgres(home) as server:
        server.create_database("watched")
        place = {"COMMANDBUS_TEST_HOST": str(server.data), "COMMANDBUS_TEST_DATABASE": "watched"}
        subprocess.run([sys.executable, "-m", "django", "migrate", "-v0"], env=environment(**place), check=True)
        log = tmp_path / "watch.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "django", "commandbus_status", "orders", "--watch", "0.05"],
                env=environment(**place, PYTHONUNBUFFERED="1"),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                wait_until(lambda: "WAITING" in log.read_text(), "the first look")
                server.restart("immediate", pause=1)
                wait_until(lambda: "database 'default' is away" in log.read_text(), "word of the restart")
                back = len(log.read_text())
                wait_until(lambda: "WAITING" in log.read_text()[back:], "the database again")
            finally:
                process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
    assert "Traceback" not in log.read_text()
