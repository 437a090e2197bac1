from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.test import override_settings

from commandbus import install
from commandbus.exceptions import InvalidCommandError
from commandbus.install import create_partitions, install_functions, prepare, register_domains
from commandbus.models import Audit, CommandType, Domain
from commandbus.pgmq import PgmqClient
from commandbus.transitions import PostgresTransitions, _own_errors

pytestmark = pytest.mark.django_db


def rows(query: str, *params: str) -> list[tuple[object, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(query, params)
        return list(cursor.fetchall())


def test_the_functions_are_installed_once_and_again_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not install_functions("default", "public")
    sources = {**install._sources(), "new.sql": "CREATE FUNCTION commandbus.added() RETURNS int RETURN 7;"}
    monkeypatch.setattr(install, "_sources", lambda: sources)
    assert install_functions("default", "public")
    assert rows("SELECT commandbus.added()") == [(7,)]


def test_a_function_that_has_changed_its_parameters_or_is_gone_leaves_nothing_behind() -> None:
    with connection.cursor() as cursor:
        cursor.execute("CREATE FUNCTION commandbus.wake(domain text, of_before integer) RETURNS int RETURN 1")
        cursor.execute("CREATE FUNCTION commandbus.of_before() RETURNS int RETURN 1")
        cursor.execute("GRANT EXECUTE ON FUNCTION commandbus.send TO pg_monitor")
        cursor.execute("DROP FUNCTION commandbus.pause")
        cursor.execute("CREATE FUNCTION commandbus.pause(domain text) RETURNS int RETURN 1")
        cursor.execute("COMMENT ON SCHEMA commandbus IS 'an older version'")
    assert install_functions("default", "public")
    alone = rows(
        "SELECT proname, max(pg_get_function_identity_arguments(oid)) FROM pg_proc"
        " WHERE pronamespace = 'commandbus'::regnamespace GROUP BY proname HAVING count(*) = 1"
    )
    functions = {str(name): arguments for name, arguments in alone}
    assert len(functions) == len(rows("SELECT oid FROM pg_proc WHERE pronamespace = 'commandbus'::regnamespace"))
    assert functions["wake"] == "domain text"
    assert functions["pause"] == "domain text, paused boolean, operator text, reason text"
    assert "of_before" not in functions
    granted = "SELECT has_function_privilege('pg_monitor', oid, 'EXECUTE') FROM pg_proc WHERE proname = 'send'"
    assert rows(f"{granted} AND pronamespace = 'commandbus'::regnamespace") == [(True,)]


def test_a_function_that_returns_something_else_than_before_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with connection.cursor() as cursor:
        cursor.execute("DROP FUNCTION commandbus.wake")
        cursor.execute("CREATE FUNCTION commandbus.wake(domain text) RETURNS int RETURN 1")
        cursor.execute("COMMENT ON SCHEMA commandbus IS 'an older version'")
    assert install_functions("default", "public")
    assert rows("SELECT commandbus.wake('orders')") == [(False,)]
    assert "wake" in caplog.text


def test_every_function_pins_its_search_path_and_is_closed_to_the_public() -> None:
    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE visitor")
        cursor.execute("GRANT USAGE ON SCHEMA commandbus TO visitor")
    functions = rows(
        "SELECT proname, proconfig, has_function_privilege('visitor', oid, 'EXECUTE'), prosrc FROM pg_proc"
        " WHERE pronamespace = 'commandbus'::regnamespace"
    )
    assert len(functions) > 15
    for name, config, callable_by_all, source in functions:
        assert not callable_by_all, name
        pinned = any(str(setting).startswith("search_path=") for setting in config or [])  # type: ignore[attr-defined]
        assert pinned or "pg_catalog." in str(source), name


def test_tables_in_another_schema_are_found() -> None:
    with connection.cursor() as cursor:
        cursor.execute('CREATE SCHEMA "Elsewhere"')
        for (table,) in rows(
            "SELECT relname FROM pg_class WHERE relname LIKE 'command_bus%%' AND relkind IN ('r','p')"
        ):
            cursor.execute(f'ALTER TABLE "{table}" SET SCHEMA "Elsewhere"')
        cursor.execute('SET LOCAL search_path = "Elsewhere", public')
    assert prepare("default")
    assert rows("SELECT commandbus.create_audit_partitions()") == [(0,)]
    assert rows(
        "SELECT count(*) FROM pg_class WHERE relname LIKE 'command_bus%%' AND relkind IN ('r', 'p')"
        " AND relnamespace = 'public'::regnamespace"
    ) == [(0,)]
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE command_bus_audit_p" + f"{datetime.now(UTC):%Y_%m}")
    create_partitions("default")
    bus = PostgresTransitions("default")
    command_id = uuid4()
    from commandbus.messages import NewCommand

    bus.send("orders", [NewCommand("Ship", command_id, {})])
    assert [r.command.command_id for r in bus.receive("orders", qty=1, vt=30)] == [command_id]


def test_a_database_without_our_tables_is_left_alone_and_setup_says_so() -> None:
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE command_bus_command RENAME TO away")
    assert not prepare("default")
    with pytest.raises(CommandError, match=r"run: manage\.py migrate"):
        call_command("commandbus_setup")


def test_a_registered_domain_has_its_four_queues_and_settings() -> None:
    with override_settings(COMMANDBUS={"DOMAINS": ["new-one"], "UNIQUE_SCOPE": "global", "MARK_IN_PROGRESS": False}):
        assert "new-one" in register_domains("default")
    queues = PgmqClient().list_queues()
    assert {f"new-one__{kind}" for kind in ("commands", "replies", "events", "events_dlq")} <= set(queues)
    domain = Domain.objects.get(name="new-one")
    assert (domain.unique_globally, domain.mark_in_progress, domain.paused) == (True, False, False)


def test_registering_again_keeps_a_pause_and_writes_nothing() -> None:
    Domain.objects.filter(name="orders").update(paused=True)
    before = rows("SELECT xmin, ctid FROM command_bus_domain WHERE name = 'orders'")
    register_domains("default")
    assert Domain.objects.get(name="orders").paused
    assert rows("SELECT xmin, ctid FROM command_bus_domain WHERE name = 'orders'") == before


def test_handled_types_are_registered_with_their_limits() -> None:
    assert CommandType.objects.get(domain="orders", command_type="PlaceOrder").max_attempts == 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("SELECT commandbus.register_domain('Orders')", "domain name 'Orders' is not valid"),
        ("SELECT commandbus.register_domain(repeat('x', 36))", "is not valid"),
        ("SELECT commandbus.register_domain('fine', 'not fine')", "reply queue 'not fine'"),
        ("SELECT commandbus.register_domain('fine', 'orders__commands')", "reply queue 'orders__commands'"),
    ],
)
def test_names_that_pgmq_cannot_hold_are_refused_in_sql_too(call: str, words: str) -> None:
    with pytest.raises(InvalidCommandError, match=words), transaction.atomic(), _own_errors():
        rows(call)


def partition_of(ts: datetime) -> str:
    Audit.objects.create(domain="orders", event_type="SENT", ts=ts)
    return str(rows("SELECT tableoid::regclass::text FROM command_bus_audit ORDER BY audit_id DESC LIMIT 1")[0][0])


def test_the_audit_has_a_partition_per_month_and_one_for_the_rest() -> None:
    now = datetime.now(UTC)
    assert partition_of(now) == f"command_bus_audit_p{now:%Y_%m}"
    assert partition_of(now + timedelta(days=5 * 365)) == "command_bus_audit_default"


def test_rows_that_the_default_partition_took_move_to_their_month() -> None:
    now = datetime.now(UTC)
    with connection.cursor() as cursor:
        cursor.execute(f"DROP TABLE command_bus_audit_p{now:%Y_%m}")
    assert partition_of(now) == "command_bus_audit_default"
    create_partitions("default")
    assert rows("SELECT tableoid::regclass::text FROM command_bus_audit") == [(f"command_bus_audit_p{now:%Y_%m}",)]
    assert rows("SELECT commandbus.create_audit_partitions()") == [(0,)]


@pytest.mark.django_db(transaction=True)
def test_a_long_lock_postpones_the_partitions_and_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    other = connection.copy()
    now = datetime.now(UTC)
    with connection.cursor() as cursor:
        cursor.execute(f"DROP TABLE command_bus_audit_p{now:%Y_%m}")
    try:
        with other.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("LOCK TABLE command_bus_audit_default")
            create_partitions("default")
            assert "partitions.postponed" in caplog.text
            cursor.execute("ROLLBACK")
    finally:
        other.close()
    create_partitions("default")
    assert partition_of(now) == f"command_bus_audit_p{now:%Y_%m}"


def test_hot_statements_reach_their_rows_by_key() -> None:
    """Lookups by status use the index on the rare ones, and nothing scans the table."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT * FROM commandbus.send('orders',"
            " ARRAY(SELECT gen_random_uuid() FROM generate_series(1, 3000)), array_fill('T'::text, ARRAY[3000]),"
            " array_fill('{}'::jsonb, ARRAY[3000]))"
        )
        cursor.execute("ANALYZE command_bus_command")
    from commandbus.messages import Status
    from commandbus.models import Command

    tsq = Command.objects.with_status("orders", Status.IN_TROUBLESHOOTING_QUEUE)[:10].explain()
    assert "ix_command_bus_command_rare" in tsq
    one = Command.objects.filter(domain="orders", command_id=uuid4()).explain()
    assert "uq_command_bus_command_domain_cmdid" in one
    newest = Command.objects.filter(domain="orders", command_type="T").order_by("-id")[:10].explain()
    assert "Seq Scan" not in newest
    trail = Audit.objects.filter(command_id=uuid4(), ts__gte=datetime.now(UTC)).explain()
    assert "command_id_ts_idx" in trail


def test_no_index_keeps_a_usual_status_change_from_being_a_hot_update() -> None:
    """What changes on the usual path stands in no index but BRIN, which does not count (from PostgreSQL 16)."""
    indexed = {
        str(column)
        for (column,) in rows(
            "SELECT a.attname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_am m ON m.oid = c.relam"
            " JOIN pg_attribute a ON a.attrelid = i.indrelid AND (a.attnum = ANY (i.indkey) OR"
            "   coalesce(pg_get_expr(i.indpred, i.indrelid), '') ~ ('\\m' || a.attname || '\\M'))"
            " WHERE i.indrelid = 'command_bus_command'::regclass AND m.amname <> 'brin'"
        )
    }
    never_changed = {"id", "domain", "command_id", "command_type", "correlation_id", "unique_globally", "batch_id"}
    changed_by_a_failure = {"rare_status", "last_error_type", "last_error_code"}
    assert indexed == never_changed | changed_by_a_failure
