"""PostgreSQL's own pgbench: one INSERT, one UPDATE and a commit, by C code that does nothing else.

It is the ceiling for whoever commits once per command.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict

JOBS = 100_000
SCRIPT = f"""
\\set id random(1, {JOBS})
BEGIN;
INSERT INTO effect (n, account) VALUES (:id, 'DE-1');
UPDATE job SET status = 'COMPLETED', updated_at = clock_timestamp() WHERE id = :id;
COMMIT;
"""


def prepare(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE effect (n integer NOT NULL, account text NOT NULL)")
        connection.execute(
            "CREATE TABLE job (id bigint PRIMARY KEY, status text NOT NULL, updated_at timestamptz)"
            " WITH (fillfactor = 45)"
        )
        connection.execute(
            "INSERT INTO job (id, status) SELECT n, 'PENDING' FROM generate_series(1, %s::bigint) AS n", [JOBS]
        )
        connection.execute("VACUUM ANALYZE job")


def transactions_per_second(binaries: Path, url: str, clients: int, seconds: int) -> float:
    server = conninfo_to_dict(url)
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(SCRIPT)
        script.flush()
        words = ["-n", "-M", "prepared", "-c", str(clients), "-j", "2", "-f", script.name]
        where = ["-h", str(server["host"]), "-U", str(server["user"]), str(server["dbname"])]
        _run(binaries, [*words, "-T", "2", *where])  # warm
        output = _run(binaries, [*words, "-T", str(seconds), *where])
    found = re.search(r"tps = ([0-9.]+)", output)
    if found is None:
        raise ValueError(f"pgbench has printed no rate: {output}")
    return float(found[1])


def _run(binaries: Path, words: list[str]) -> str:
    return subprocess.run([binaries / "pgbench", *words], capture_output=True, text=True, check=True).stdout
