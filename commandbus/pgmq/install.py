"""PGMQ in a database: the extension where there is one, else the SQL that the official client carries."""

from __future__ import annotations

from django.db.backends.base.base import BaseDatabaseWrapper
from pgmq.install import get_embedded_install_sql, get_embedded_sql_version

from commandbus.exceptions import ConfigurationError

REQUIRED = (
    "pgmq.create(text)",
    "pgmq.drop_queue(text)",
    "pgmq.list_queues()",
    "pgmq.send_batch(text, jsonb[], timestamptz)",
    "pgmq.read(text, integer, integer, jsonb)",
    "pgmq.delete(text, bigint[])",
    "pgmq.archive(text, bigint[])",
    "pgmq.set_vt(text, bigint[], timestamptz)",
    "pgmq.purge_queue(text)",
    "pgmq.metrics(text)",
)
OLDEST_POSTGRESQL = 15


def install_pgmq(connection: BaseDatabaseWrapper) -> str:
    """Make PGMQ available and answer where it came from. To be called in the transaction of a migration."""
    require_postgresql(connection)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT to_regnamespace('pgmq') IS NOT NULL,"
            " EXISTS (SELECT FROM pg_available_extensions WHERE name = 'pgmq')"
        )
        present, available = cursor.fetchone()
        if present:
            origin = "found"
        elif available:
            cursor.execute("CREATE EXTENSION pgmq")
            origin = "extension"
        else:
            cursor.execute(get_embedded_install_sql(), None)
            origin = f"SQL {get_embedded_sql_version()}"
    _require_functions(connection)
    return origin


def require_postgresql(connection: BaseDatabaseWrapper) -> None:
    if connection.vendor != "postgresql":
        raise ConfigurationError(
            f"commandbus needs PostgreSQL, and database {connection.alias!r} is {connection.vendor}; "
            f"keep the app 'commandbus' away from it with a database router"
        )
    with connection.cursor() as cursor:
        cursor.execute("SHOW server_version_num")
        version = int(cursor.fetchone()[0]) // 10000
    if version < OLDEST_POSTGRESQL:
        raise ConfigurationError(
            f"commandbus needs PostgreSQL {OLDEST_POSTGRESQL} or newer; database {connection.alias!r} is {version}"
        )


def _require_functions(connection: BaseDatabaseWrapper) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT name FROM unnest(%s::text[]) AS name WHERE to_regprocedure(name) IS NULL", [list(REQUIRED)]
        )
        missing = [name for (name,) in cursor.fetchall()]
        cursor.execute("SELECT extversion FROM pg_extension WHERE extname = 'pgmq'")
        row = cursor.fetchone()
    if missing:
        version = f"version {row[0]}" if row else "of unknown version"
        remedy = "ALTER EXTENSION pgmq UPDATE" if row else f"install PGMQ {get_embedded_sql_version()}"
        raise ConfigurationError(
            f"the PGMQ in database {connection.alias!r} ({version}) lacks {', '.join(missing)}; remedy: {remedy}"
        )
