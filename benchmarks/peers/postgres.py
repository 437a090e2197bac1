"""What the peers on PostgreSQL share."""

from __future__ import annotations

import psycopg


def analyze(url: str) -> None:
    """Give the planner the statistics that it has in every database older than a minute.

    Without them the peers sort the whole backlog to fetch one job, which no user of theirs sees for long.
    """
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("ANALYZE")


def how_many(url: str, statement: str) -> int:
    with psycopg.connect(url) as connection:
        return int(connection.execute(statement.encode()).fetchall()[0][0])
