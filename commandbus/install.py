"""What a database needs beyond its tables: the SQL functions, the audit's partitions, the domains.

All of it is idempotent and cheap when there is nothing to do, because `post_migrate` also fires after every test flush.
"""

from __future__ import annotations

import hashlib
import logging
import re
from importlib import resources

from django.db import OperationalError, ProgrammingError, connections, transaction
from django.db.backends.utils import CursorWrapper

from commandbus import conf
from commandbus.exceptions import ConfigurationError
from commandbus.handlers import registry

logger = logging.getLogger(__name__)

TABLES = "public.command_bus_"
OTHER_RESULT = "42P13"
"""The SQLSTATE of a function that cannot be replaced, because it returns something else now."""


def prepare(using: str) -> bool:
    """Bring the functions, partitions and domains of one database up to date. False if it has not our tables."""
    schema = _schema_of_tables(using)
    if schema is None:
        return False
    install_functions(using, schema)
    create_partitions(using)
    register_domains(using)
    return True


def install_functions(using: str, schema: str) -> bool:
    """Install `commandbus/sql` unless it is there already. Answers whether it was installed."""
    quoted = connections[using].ops.quote_name(schema)
    sources = [source.replace(TABLES, f"{quoted}.command_bus_") for source in _sources().values()]
    script = "\n".join(sources)
    version = f"commandbus functions, one of each name {hashlib.sha256(script.encode()).hexdigest()}"
    if _installed_version(using) == version:
        return False
    with transaction.atomic(using=using), connections[using].cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended('commandbus.install', 0))")
        cursor.execute("CREATE SCHEMA IF NOT EXISTS commandbus")
        cursor.execute("SET LOCAL check_function_bodies = off")  # they call each other, in any order
        _drop_functions(cursor, _superfluous(cursor, script))
        before = {oid for oids in _functions(cursor).values() for oid in oids}
        for source in sources:
            _create(cursor, source)
        # A function with other parameters does not replace the one before: calls could mean either.
        _drop_functions(cursor, [oid for oid in _superfluous(cursor, script) if oid in before])
        cursor.execute("REVOKE ALL ON SCHEMA commandbus FROM PUBLIC")
        cursor.execute("REVOKE ALL ON ALL FUNCTIONS IN SCHEMA commandbus FROM PUBLIC")
        cursor.execute(f"COMMENT ON SCHEMA commandbus IS '{version}'")
    logger.info("functions.installed database=%s", using)
    return True


def _functions(cursor: CursorWrapper) -> dict[str, list[int]]:
    """The oids of what is installed, by name."""
    cursor.execute(
        "SELECT proname, array_agg(oid) FROM pg_proc WHERE pronamespace = to_regnamespace('commandbus') GROUP BY 1"
    )
    return dict(cursor.fetchall())


def _create(cursor: CursorWrapper, source: str) -> None:
    try:
        with transaction.atomic(using=cursor.db.alias):
            cursor.execute(source, None)
    except ProgrammingError as error:
        if getattr(error.__cause__, "sqlstate", None) != OTHER_RESULT:
            raise
        names = _names(source)
        logger.warning("functions.dropped names=%s: what was granted on them has to be granted again", ",".join(names))
        _drop_functions(cursor, [oid for name, oids in _functions(cursor).items() if name in names for oid in oids])
        cursor.execute(source, None)


def _names(script: str) -> list[str]:
    return re.findall(r"CREATE OR REPLACE FUNCTION commandbus\.(\w+)", script)


def _superfluous(cursor: CursorWrapper, script: str) -> list[int]:
    """What the script does not have, or has only one of where there are several."""
    wanted = _names(script)
    return [oid for name, oids in _functions(cursor).items() if name not in wanted or len(oids) > 1 for oid in oids]


def _drop_functions(cursor: CursorWrapper, oids: list[int]) -> None:
    cursor.execute("SELECT format('DROP FUNCTION %%s', f.oid::regprocedure) FROM unnest(%s::oid[]) AS f(oid)", [oids])
    for (statement,) in cursor.fetchall():
        cursor.execute(statement)


def create_partitions(using: str) -> None:
    with connections[using].cursor() as cursor:
        try:
            cursor.execute("SELECT commandbus.create_audit_partitions()")
        except OperationalError as error:
            # A long transaction holds a lock. The default partition takes the rows meanwhile.
            logger.warning("partitions.postponed database=%s reason=%s", using, str(error).strip())


def register_domains(using: str) -> list[str]:
    """Register the domains of this database: from the settings and from the handlers that were found."""
    config = conf.current()
    mine = [name for name in domains() if config.database_of(name) == using]
    queues = sorted({config.reply_queue_of(name) for name in registry.reply_domains() & set(mine)})
    with transaction.atomic(using=using), connections[using].cursor() as cursor:
        for name in mine:
            _register_domain(cursor, name, config.retry_policy.max_attempts)
            handlers = [handler for handler in registry.in_domain(name) if not handler.replies]
            if handlers:
                cursor.execute(
                    "SELECT commandbus.register_types(%s, %s::text[], %s::int[])",
                    [name, [h.command_type for h in handlers], [h.policy.max_attempts for h in handlers]],
                )
        for queue in queues:
            attempts = max(handler.policy.max_attempts for handler in registry.of_replies(queue))
            _register_domain(cursor, queue, attempts, replies=True)
    return [*mine, *queues]


def _register_domain(cursor: CursorWrapper, name: str, max_attempts: int, *, replies: bool = False) -> None:
    config = conf.current()
    cursor.execute(
        "SELECT commandbus.register_domain(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        [
            name,
            config.reply_queue,
            max_attempts,
            config.mark_in_progress,
            config.unique_scope == "global" and not replies,
            config.reset_attempts_on_operator_retry,
            config.payload_archive and not replies,
            config.max_payload_bytes,
            config.crash_limit,
            config.unknown_type_grace,
            replies,
        ],
    )


def databases() -> list[str]:
    """Those that domains live on; the default one, where there is no domain yet."""
    config = conf.current()
    return sorted({config.database_of(name) for name in domains()} or {conf.DEFAULT_ALIAS})


def domains() -> list[str]:
    config = conf.current()
    if config.reply_queue in {*config.domains, *registry.domains()}:
        raise ConfigurationError(
            f"COMMANDBUS['REPLY_QUEUE'] is {config.reply_queue!r}, which is also a domain; choose another name for it"
        )
    return sorted({*config.domains, *registry.domains(), *(set(config.databases) - {config.reply_queue})})


def _sources() -> dict[str, str]:
    folder = resources.files("commandbus") / "sql"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def _installed_version(using: str) -> str | None:
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT obj_description(to_regnamespace('commandbus'), 'pg_namespace')")
        row = cursor.fetchone()
    return row[0] if row else None


def _schema_of_tables(using: str) -> str | None:
    connection = connections[using]
    if connection.vendor != "postgresql":
        return None
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = to_regclass('command_bus_command')"
        )
        row = cursor.fetchone()
    return row[0] if row else None
