from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from commandbus.embedded import EmbeddedPostgres
from tests.helpers import environment, wait_until, worker_process

pytestmark = pytest.mark.integration

SEND = """
    SELECT count(*) FROM commandbus.send(
        'orders',
        ARRAY(SELECT gen_random_uuid() FROM generate_series(1, %(n)s)),
        array_fill(%(type)s::text, ARRAY[%(n)s]),
        array_fill('{"sleep": 0.02}'::jsonb, ARRAY[%(n)s])
    )
"""


@pytest.mark.parametrize("vt", [30, 1])
def test_workers_survive_a_restart_of_postgresql(home: Path, vt: int) -> None:
    """Also one that lasts longer than their leases."""
    with EmbeddedPostgres(home) as server:
        server.create_database("restarted")
        place = {"COMMANDBUS_TEST_HOST": str(server.data), "COMMANDBUS_TEST_DATABASE": "restarted"}
        migrate = [sys.executable, "-m", "django", "migrate", "-v0"]
        subprocess.run(migrate, env=environment(**place), check=True)
        with worker_process("orders", "--concurrency=4", "--processes=2", f"--vt={vt}", **place) as worker:
            for kind in ("PlaceOrder", "SendMail"):
                with psycopg.connect(server.url("restarted")) as connection:
                    connection.execute(SEND, {"n": 200, "type": kind})
                wait_until(lambda k=kind: count(server, f"command_type = '{k}' AND status = 'COMPLETED'") > 20)  # type: ignore[misc]
                server.restart("immediate", pause=1.5 * vt if vt < 5 else 0)
                wait_until(lambda k=kind: count(server, f"command_type = '{k}' AND status = 'COMPLETED'") == 200)  # type: ignore[misc]
            output = worker.end()
        assert worker.returncode == 0, output
        assert count(server, "attempts <> 1 OR crash_count > 0 OR vanished_count > 0 OR suspect") == 0
        with psycopg.connect(server.url("restarted")) as connection:
            [orders] = connection.execute("SELECT count(*) FROM shop_order").fetchone() or [None]
            [replies] = connection.execute("SELECT count(*) FROM pgmq.q_orders__replies").fetchone() or [None]
        assert (orders, replies) == (200, 400)


def count(server: EmbeddedPostgres, condition: str) -> int:
    with psycopg.connect(server.url("restarted")) as connection:
        row = connection.execute(f"SELECT count(*) FROM command_bus_command WHERE {condition}").fetchone()  # noqa: S608
    assert row is not None
    return int(row[0])
