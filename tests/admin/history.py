"""Two million commands that have ended, and a few of every other kind among them; and many batches."""

from __future__ import annotations

from uuid import UUID

from django.db import connection

COUNT = 2_000_000

CHAIN, PAIR = UUID(int=1 << 100), UUID(int=2 << 100)
"""Correlation ids: of a hundred thousand commands, and of two."""
BUSY, GONE = UUID(int=3 << 100), UUID(int=4 << 100)
"""Nodes: one has run nearly everything, the other only the first hundred."""
BATCH = UUID(int=5 << 100)
"""Of the first 200,000 commands; 20 of them wait for an operator."""

FILL = """
    INSERT INTO command_bus_command (
        domain, queue_name, command_id, command_type, status, attempts, max_attempts, node_id, correlation_id,
        content_hash, created_at, updated_at, last_error_type, last_error_code, last_error_msg, reply_queue, batch_id)
    SELECT
        CASE WHEN n %% 10 = 0 THEN 'other' ELSE 'orders' END,
        CASE WHEN n %% 10 = 0 THEN 'other__commands' ELSE 'orders__commands' END,
        (lpad(to_hex(n * 1000), 12, '0') || substr(md5(n::text), 1, 20))::uuid,
        CASE WHEN n <= %(count)s / 2 THEN 'PlaceOrder' WHEN n <= %(count)s - 3 THEN 'SendMail' ELSE 'Echo' END,
        CASE WHEN n <= 20 THEN 'IN_TROUBLESHOOTING_QUEUE' WHEN n %% 20 = 1 THEN 'FAILED' ELSE 'COMPLETED' END,
        CASE WHEN n BETWEEN 21 AND 25 THEN 7 WHEN n %% 20 = 1 THEN 2 ELSE 1 END, 10,
        CASE WHEN n <= 100 THEN %(gone)s ELSE %(busy)s END,
        CASE WHEN n %% 20 = 3 THEN %(chain)s WHEN n IN (1000, 2000) THEN %(pair)s
             ELSE (lpad(to_hex(n * 1000), 12, '0') || substr(md5(n::text), 1, 20))::uuid END,
        '', t.at, t.at, e.type, e.code, e.code, NULL, CASE WHEN n <= 200000 THEN %(batch)s::uuid END
    FROM generate_series(1, %(count)s) AS n
    CROSS JOIN LATERAL (SELECT now() - (%(count)s - n) * interval '2 seconds' AS at) AS t
    CROSS JOIN LATERAL (
        SELECT CASE WHEN n <= 25 THEN 'RareError' WHEN n %% 20 = 1 THEN 'RefusedError' END AS type,
               CASE WHEN n <= 25 THEN 'RARE' WHEN n %% 20 = 1 THEN 'REFUSED' END AS code
    ) AS e
"""

FILL_BATCHES = """
    INSERT INTO command_bus_batch (
        batch_id, domain, name, status, created_at, updated_at, sealed_at, completed_at, total_count, completed_count)
    SELECT
        (lpad(to_hex(n * 1000), 12, '0') || substr(md5(n::text), 1, 20))::uuid,
        CASE WHEN n %% 10 = 0 THEN 'other' ELSE 'orders' END,
        CASE WHEN n <= 5 THEN 'Rare ' ELSE 'Batch ' END || n,
        CASE WHEN n <= 3 THEN 'PENDING' WHEN n <= 6 THEN 'IN_PROGRESS' WHEN n %% 20 = 1 THEN 'COMPLETED_WITH_FAILURES'
             ELSE 'COMPLETED' END,
        t.at, t.at, t.at, CASE WHEN n > 6 THEN t.at END, 1, 1
    FROM generate_series(1, %(count)s) AS n
    CROSS JOIN LATERAL (SELECT now() - (%(count)s - n) * interval '1 minute' AS at) AS t
"""

FILL_AUDIT = """
    INSERT INTO command_bus_audit (domain, command_id, event_type, ts, details_json)
    SELECT 'orders', c.command_id,
           CASE WHEN c.id %% 1000 = 0 THEN 'RETRY_SCHEDULED' WHEN c.id <= 5 THEN 'OPERATOR_RETRY' ELSE 'SENT' END,
           c.created_at,
           CASE WHEN c.id <= 5 THEN '{"operator": "olga"}'::jsonb END
    FROM command_bus_command c
    WHERE c.id <= %(count)s
"""


def fill(count: int = COUNT) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT setval(pg_get_serial_sequence('command_bus_command', 'id'), 1, false)")
        cursor.execute(
            "INSERT INTO command_bus_batch (batch_id, domain, name, status, total_count, in_troubleshooting_count)"
            " VALUES (%s, 'orders', 'The large one', 'IN_PROGRESS', 200000, 20)",
            [BATCH],
        )
        fill_batches(count // 20)
        ids = {"chain": CHAIN, "pair": PAIR, "busy": BUSY, "gone": GONE, "batch": BATCH}
        cursor.execute(FILL, {"count": count, **ids})
        cursor.execute(FILL_AUDIT, {"count": count // 4})
        cursor.execute("ANALYZE command_bus_command, command_bus_audit")


def fill_batches(count: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(FILL_BATCHES, {"count": count})
        cursor.execute("ANALYZE command_bus_batch")
