"""Domains on two real databases: what is installed where, and what applications and operators do there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings

from commandbus import (
    CommandRefusedError,
    NewCommand,
    Status,
    UnknownQueueError,
    audit_trail,
    cancel_command,
    get_command,
    list_commands,
    nodes,
    ops,
    pause_domain,
    resume_domain,
    send_command,
    send_commands,
    wait_for_reply,
)
from commandbus.messages import ErrorInfo, Failure, Finish
from commandbus.models import Command, CommandType, Domain, Node, Tombstone
from commandbus.pgmq import PgmqClient, notify
from commandbus.pgmq.notify import channel, channel_of_node, set_idle
from commandbus.testing.time import purge
from commandbus.transitions import PostgresTransitions
from tests.helpers import BOTH, environment, keep, listening, reload, replies, status, wait_until
from tests.settings import TEST_SERVER
from tests.shell.helpers import run
from tests.shop.models import Order

both = pytest.mark.django_db(databases=BOTH)
both_committing = pytest.mark.django_db(transaction=True, databases=BOTH)

SECOND = PostgresTransitions("second")
TABLES = ["auth_user", "command_bus_command", "shop_order"]


def rows(using: str, query: str) -> list[tuple[Any, ...]]:
    with connections[using].cursor() as cursor:
        cursor.execute(query)
        return list(cursor.fetchall())


# What is installed.


@pytest.fixture
def empty_databases(postgres: None) -> Iterator[list[str]]:
    names = [f"empty_{uuid4().hex}" for _ in range(2)]
    for name in names:
        TEST_SERVER.create_database(name)
    yield names
    with psycopg.connect(TEST_SERVER.url("postgres"), autocommit=True) as admin:
        for name in names:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def manage(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "django", *words],
        env=environment(**changes),
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_database_can_be_migrated_without_the_other(empty_databases: list[str]) -> None:
    first, second = empty_databases
    place = {"COMMANDBUS_TEST_DATABASE": first, "COMMANDBUS_TEST_SECOND_DATABASE": second}
    done = manage("migrate", "-v0", "--database", "second", **place)
    assert done.returncode == 0, done.stderr
    with psycopg.connect(TEST_SERVER.url(second)) as connection:
        command_id = uuid4()
        connection.execute(
            "SELECT commandbus.send('archive', ARRAY[%s]::uuid[], ARRAY['KeepOrder'], ARRAY['{}'::jsonb])", [command_id]
        )
        domains = connection.execute("SELECT name FROM command_bus_domain").fetchall()
        queues = connection.execute("SELECT queue_name FROM pgmq.list_queues() ORDER BY 1").fetchall()
        audited = connection.execute("SELECT tableoid::regclass::text FROM command_bus_audit").fetchall()
    assert domains == [("archive",)]
    assert queues == [(f"archive__{kind}",) for kind in ("commands", "events", "events_dlq", "replies")]
    assert audited == [(f"command_bus_audit_p{datetime.now(UTC):%Y_%m}",)]
    with psycopg.connect(TEST_SERVER.url(first)) as connection:
        assert connection.execute("SELECT to_regclass('command_bus_domain')").fetchone() == (None,)
    done = manage("commandbus_worker", "archive", "--until-empty", **place)
    assert done.returncode == 0, done.stderr
    with psycopg.connect(TEST_SERVER.url(second)) as connection:
        ended = connection.execute("SELECT command_id, status FROM command_bus_command").fetchall()
    assert ended == [(command_id, "COMPLETED")]


def settings_in(folder: Path, text: str) -> dict[str, str]:
    """The environment of a process with these settings."""
    (folder / "changed_settings.py").write_text(f"from tests.settings import *\n{text}")
    return {
        "DJANGO_SETTINGS_MODULE": "changed_settings",
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
    }


ROUTER = """

class Router:
    def db_for_read(self, model, **hints):
        return "second" if model._meta.app_label == "shop" else None

    db_for_write = db_for_read

    def allow_migrate(self, db, app_label, **hints):
        if app_label == "commandbus":
            return None
        return (db == "second") == (app_label == "shop")

DATABASE_ROUTERS = [Router()]
"""


def test_a_router_can_keep_the_tables_of_other_apps_apart(empty_databases: list[str], tmp_path: Path) -> None:
    place = {
        "COMMANDBUS_TEST_DATABASE": empty_databases[0],
        "COMMANDBUS_TEST_SECOND_DATABASE": empty_databases[1],
        **settings_in(tmp_path, ROUTER),
    }
    found = []
    for using, name in zip(BOTH, empty_databases, strict=True):
        done = manage("migrate", "-v0", "--database", using, **place)
        assert done.returncode == 0, done.stderr
        with psycopg.connect(TEST_SERVER.url(name)) as connection:
            tables = connection.execute("SELECT relname FROM pg_class WHERE relname = ANY(%s) ORDER BY 1", [TABLES])
            found.append([table for (table,) in tables])
    assert found == [["auth_user", "command_bus_command"], ["command_bus_command", "shop_order"]]


@both
def test_each_database_has_the_functions_and_partitions_and_only_its_own_domains() -> None:
    names = {using: list(Domain.objects.using(using).values_list("name", flat=True).order_by("name")) for using in BOTH}
    assert "orders" in names["default"]
    assert "archive" not in names["default"]
    assert names["second"] == ["archive"]
    types = CommandType.objects.using("second").values_list("domain", "command_type", "max_attempts")
    assert sorted(types) == [("archive", kind, 3) for kind in ("KeepOrder", "KeepOrders", "SendMail")]
    installed = "SELECT proname FROM pg_proc WHERE pronamespace = 'commandbus'::regnamespace ORDER BY 1"
    assert rows("second", installed) == rows("default", installed)
    partitions = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'command_bus_audit'::regclass"
    assert (f"command_bus_audit_p{datetime.now(UTC):%Y_%m}",) in rows("second", partitions)


@both
def test_setup_brings_both_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    for using in BOTH:
        Domain.objects.using(using).all().delete()
        with connections[using].cursor() as cursor:
            cursor.execute("COMMENT ON SCHEMA commandbus IS 'of another release'")
            cursor.execute("DROP FUNCTION commandbus.wake")
    call_command("commandbus_setup")
    for using in BOTH:
        assert rows(using, "SELECT commandbus.wake('archive')") == [(False,)]
    default, second = capsys.readouterr().out.splitlines()
    assert default.startswith("default: functions are up to date; domains: orders, other, payments, reports, sales")
    assert second == "second: functions are up to date; domains: archive"
    assert [domain.name for domain in Domain.objects.using("second").all()] == ["archive"]


@both
def test_setup_names_the_database_that_is_not_migrated() -> None:
    with connections["second"].cursor() as cursor:
        cursor.execute("ALTER TABLE command_bus_command RENAME TO away")
    with pytest.raises(CommandError, match=r"database 'second' .* run: manage\.py migrate --database second"):
        call_command("commandbus_setup")


ALL_ON_SECOND: dict[str, Any] = {
    "DOMAINS": [],
    "DATABASES": dict.fromkeys(["archive", "orders", "payments", "reports", "sales"], "second"),
}


@both
def test_a_default_database_that_no_domain_lives_on_needs_no_tables(capsys: pytest.CaptureFixture[str]) -> None:
    with connections["default"].cursor() as cursor:
        cursor.execute("ALTER TABLE command_bus_command RENAME TO away")
    with override_settings(COMMANDBUS=ALL_ON_SECOND):
        call_command("commandbus_setup")
        purge()
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("second: functions are up to date; domains: archive, orders, payments, reports, sales")


SQLITE = """
class Router:
    def allow_migrate(self, db, app_label, **hints):
        return db == "second" if app_label == "commandbus" else None

DATABASES["default"] = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
DATABASE_ROUTERS = [Router()]
"""


def test_a_default_database_that_no_domain_lives_on_may_be_of_another_kind(tmp_path: Path) -> None:
    place = settings_in(tmp_path, SQLITE)
    done = manage("migrate", "-v0", COMMANDBUS_TEST_SETTINGS=json.dumps(ALL_ON_SECOND), **place)
    assert done.returncode == 0, done.stderr
    wrong = {**ALL_ON_SECOND, "DOMAINS": ["other"]}
    done = manage("check", COMMANDBUS_TEST_SETTINGS=json.dumps(wrong), **place)
    assert "database 'default' has the engine 'django.db.backends.sqlite3'" in done.stderr


def test_manage_check_names_a_wrong_alias() -> None:
    done = manage("check", COMMANDBUS_TEST_SETTINGS=json.dumps({"DATABASES": {"archive": "nowhere"}}))
    assert done.returncode == 1
    assert "COMMANDBUS['DATABASES']" in done.stderr
    assert "'nowhere' is not in DATABASES, which has default, second" in done.stderr


@both
def test_replies_go_to_a_queue_of_the_same_database() -> None:
    with pytest.raises(UnknownQueueError, match=r"there is no reply queue 'orders\.replies' in database 'second'"):
        send_command("archive", "KeepOrder", uuid4(), {}, reply_to="orders.replies")
    sent = send_command("archive", "KeepOrder", uuid4(), {}, reply_to="archive.replies")
    assert reload(sent, "archive").reply_queue == "archive__replies"


@both
def test_an_id_that_is_unique_globally_is_so_in_its_database() -> None:
    for using in BOTH:
        Domain.objects.using(using).update(unique_globally=True)
    command_id = uuid4()
    send_command("orders", "PlaceOrder", command_id, {})
    send_command("archive", "KeepOrder", command_id, {})
    assert (reload(command_id).command_type, reload(command_id, "archive").command_type) == ("PlaceOrder", "KeepOrder")


class Astray:
    def __init__(self, using: str) -> None:
        self.using = using

    def db_for_read(self, model: object, **hints: object) -> str:
        return self.using

    db_for_write = db_for_read


@both
@pytest.mark.parametrize(
    ("using", "domain", "astray"), [("second", "archive", "default"), ("default", "orders", "second")]
)
def test_no_router_leads_the_bus_away_from_the_database_of_a_domain(
    using: str, domain: str, astray: str, commandbus_run: Callable[..., int]
) -> None:
    with override_settings(DATABASE_ROUTERS=[Astray(astray)]):
        assert Command.objects.db == astray
        sent = send_command(domain, "SendMail", uuid4(), {})
        assert commandbus_run(domain) == 1
        assert [command.command_id for command in list_commands(domain, status="COMPLETED")] == [sent]
        assert [row.event_type for row in audit_trail(domain, sent)] == ["SENT", "RECEIVED", "COMPLETED"]
        nodes.register(using, node_id=sent, name="n", role="worker", domains=[domain], handled_types={})
        nodes.stopped(using, sent)
    assert Node.objects.using(using).get().stopped_at is not None
    assert not Node.objects.using(astray).exists()


# What applications and operators do.


def in_troubleshooting(count: int) -> list[UUID]:
    ids = send_commands("archive", [NewCommand("KeepOrder", uuid4(), {"n": n}) for n in range(count)])
    received = SECOND.receive("archive", qty=count, vt=30)
    SECOND.fail("archive", [Failure(one.lease, ErrorInfo("T", "C", "m")) for one in received])
    return ids


@both
def test_commands_of_the_second_are_found_listed_and_canceled_there() -> None:
    first, second = keep(n=1), keep(n=2)
    send_command("orders", "PlaceOrder", first, {})
    cancel_command("archive", first, "not needed")
    with pytest.raises(CommandRefusedError, match="its status is CANCELED"):
        cancel_command("archive", first)
    assert [command.command_id for command in list_commands("archive")] == [second, first]
    assert [command.command_id for command in list_commands("archive", status=Status.CANCELED)] == [first]
    assert [row.event_type for row in audit_trail("archive", first)] == ["SENT", "CANCELED"]
    assert (status(first, "archive"), status(first, "orders")) == ("CANCELED", "PENDING")
    assert get_command("orders", second) is None
    assert audit_trail("orders", second) == []
    assert [reply["outcome"] for reply in replies("archive")] == ["CANCELED"]


@both
def test_a_domain_of_the_second_is_paused_there() -> None:
    kept = keep()
    assert pause_domain("archive")
    assert not pause_domain("archive")
    assert SECOND.receive("archive", qty=1, vt=30) == []
    assert resume_domain("archive")
    assert [one.command.command_id for one in SECOND.receive("archive", qty=1, vt=30)] == [kept]


@both
def test_an_operator_resolves_commands_of_the_second() -> None:
    again, canceled, completed = in_troubleshooting(3)
    assert [a.done for a in SECOND.operator_retry("archive", [again], "alice", "once more")] == [True]
    assert [a.done for a in SECOND.operator_cancel("archive", [canceled], "no", "alice")] == [True]
    assert [a.done for a in SECOND.operator_complete("archive", [completed], {"by": "hand"}, "alice")] == [True]
    [refused] = SECOND.operator_retry("archive", [completed], "alice")
    assert refused.why == "its status is COMPLETED"
    assert [status(c, "archive") for c in (again, canceled, completed)] == ["PENDING", "CANCELED", "COMPLETED"]
    assert audit_trail("archive", again)[-1].event_type == "OPERATOR_RETRY"
    [received] = SECOND.receive("archive", qty=1, vt=30)
    assert (received.command.command_id, received.command.data) == (again, {"n": 0})
    assert {reply["command_id"]: reply["outcome"] for reply in replies("archive")} == {
        str(canceled): "CANCELED",
        str(completed): "SUCCESS",
    }


@both
def test_the_operators_api_and_the_shell_follow_a_domain_to_its_database() -> None:
    edited, canceled, again = in_troubleshooting(3)
    assert {command.command_id for command in ops.list_troubleshooting("archive")} == {again, canceled, edited}
    assert ops.get_payload("archive", edited) == {"n": 0}
    ops.operator_edit("archive", edited, {"n": 7}, operator="alice")
    assert run("commandbus_tsq", "cancel", "archive", str(canceled), "--reason=no").code == 0
    assert ops.operator_retry_many("archive", ops.TroubleshootingFilter(type="KeepOrder")).done == [again]
    assert [status(c, "archive") for c in (edited, canceled, again)] == ["PENDING", "CANCELED", "PENDING"]
    assert {one.command.data["n"] for one in SECOND.receive("archive", qty=3, vt=30)} == {2, 7}
    [line] = [line for line in run("commandbus_status").lines if line.startswith("archive")]
    assert line.split() == ["archive", "0", "0", "2", "0", "1"]


@both
@pytest.mark.parametrize(("domain", "kind"), [("orders", "PlaceOrder"), ("archive", "KeepOrder")])
def test_a_reply_is_found_in_whatever_database_it_is(
    domain: str, kind: str, commandbus_run: Callable[..., int]
) -> None:
    sent = send_command(domain, kind, uuid4(), {})
    commandbus_run(domain)
    assert wait_for_reply(sent, 0).domain == domain


@both
def test_old_commands_of_the_second_are_pruned_there() -> None:
    kept, waiting = keep(), keep()
    [received] = SECOND.receive("archive", qty=1, vt=30)
    SECOND.finish("archive", [Finish(received.lease, Status.COMPLETED)])
    assert SECOND.prune_commands("archive", datetime.now(UTC) + timedelta(days=1), 100) == 1
    assert [command.command_id for command in list_commands("archive")] == [waiting]
    assert [stone.command_id for stone in Tombstone.objects.using("second").all()] == [kept]
    send_command("archive", "KeepOrder", kept, {})  # known for ever, and so not sent again
    assert [command.command_id for command in list_commands("archive")] == [waiting]


@both
def test_the_fixtures_of_applications_follow_a_domain_to_its_database(
    commandbus_run: Callable[..., int], commandbus_advance: Callable[..., None]
) -> None:
    kept = keep(fail_attempts=1)
    assert commandbus_run("archive") == 1
    commandbus_advance("archive", 60)
    assert commandbus_run("archive") == 1
    assert status(kept, "archive") == "COMPLETED"
    assert [order.number for order in Order.objects.using("second").all()] == [str(kept)]
    assert not Order.objects.exists()


@pytest.mark.parametrize("run", [1, 2])
@both_committing
def test_the_queues_of_both_are_empty_after_a_test_that_commits(commandbus_queues: None, run: int) -> None:
    assert PgmqClient("second").metrics("archive__commands").queue_length == 0
    keep()


@both_committing
def test_a_send_to_the_second_notifies_those_who_listen_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "_nobody_idle_until", {})
    nodes = {using: uuid4() for using in BOTH}
    channels = {using: [channel("archive"), channel_of_node(nodes[using])] for using in BOTH}
    with listening("default", channels["default"]) as first, listening("second", channels["second"]) as second:
        for using in BOTH:
            set_idle(["archive"], nodes[using], using)
        keep()
        wait_until(second.is_set)
        assert not first.is_set()
        assert rows("second", "SELECT * FROM command_bus_idle_worker") == []
