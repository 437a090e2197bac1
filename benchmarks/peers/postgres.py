"""What the peers on PostgreSQL share."""

from __future__ import annotations

import psycopg


def how_many(url: str, statement: str) -> int:
    with psycopg.connect(url) as connection:
        return int(connection.execute(statement.encode()).fetchall()[0][0])
