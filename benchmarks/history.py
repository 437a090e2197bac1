"""Commands that were worked off long ago, with their audit."""

from __future__ import annotations

from collections.abc import Callable

import psycopg

CHUNK = 250_000

COMMANDS = """
    INSERT INTO command_bus_command (
        domain, queue_name, msg_id, command_id, command_type, status, attempts, max_attempts, node_id,
        created_at, updated_at, reply_queue, correlation_id, content_hash
    )
    SELECT 'bench', 'bench__commands', n, i.id, 'io', 'COMPLETED', 1, 3, %(node)s::uuid,
           i.at, i.at + interval '1 second', 'bench__replies', i.id, sha256(n::text::bytea)
    FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n,
         LATERAL (
             SELECT uuidv7(-a.ago) AS id, now() - a.ago AS at
             FROM make_interval(secs => (%(total)s - n) * 0.2) AS a(ago)
         ) AS i
    RETURNING command_id, created_at
"""
AUDIT = f"""
    WITH command AS ({COMMANDS})
    INSERT INTO command_bus_audit (domain, command_id, event_type, ts, details_json)
    SELECT 'bench', c.command_id, e.event, c.created_at + e.after,
           CASE e.event WHEN 'SENT' THEN NULL ELSE jsonb_build_object('attempt', 1, 'node_id', %(node)s::text) END
    FROM command AS c,
         (VALUES ('SENT', interval '0'), ('RECEIVED', interval '0.5 s'), ('COMPLETED', interval '1 s'))
             AS e(event, after)
"""


def make_history(url: str, commands: int, progress: Callable[[int], None]) -> None:
    """`progress` is told how many there are by now."""
    node = "00000000-0000-4000-8000-000000000000"
    with psycopg.connect(url, autocommit=True) as connection:
        for first in range(1, commands + 1, CHUNK):
            last = min(first + CHUNK - 1, commands)
            connection.execute(AUDIT, {"first": first, "last": last, "total": commands, "node": node})
            progress(last)
        connection.execute("VACUUM ANALYZE")
