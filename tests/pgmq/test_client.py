"""One contract for PGMQ as we install it and for its fake."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection

from commandbus.exceptions import ConfigurationError
from commandbus.pgmq import PgmqClient
from commandbus.pgmq.install import install_pgmq, require_postgresql
from commandbus.testing import FakePgmqClient

QUEUE = "client_contract"


@pytest.fixture(params=[pytest.param("fake"), pytest.param("real", marks=pytest.mark.django_db)])
def client(request: pytest.FixtureRequest) -> PgmqClient | FakePgmqClient:
    made: PgmqClient | FakePgmqClient
    if request.param == "real":
        request.getfixturevalue("db")
        made = PgmqClient()
    else:
        made = FakePgmqClient()
    made.create_queue(QUEUE)
    return made


def test_messages_are_read_in_order_and_hidden_for_the_visibility_timeout(client: PgmqClient) -> None:
    ids = client.send_batch(QUEUE, [{"n": 1}, {"n": 2}])
    first = client.read(QUEUE, vt=30, qty=10)
    assert [(m.msg_id, m.read_ct, m.message) for m in first] == [(ids[0], 1, {"n": 1}), (ids[1], 1, {"n": 2})]
    assert client.read(QUEUE, vt=30, qty=10) == []
    client.shift_visibility(QUEUE, timedelta(seconds=31))
    assert [m.read_ct for m in client.read(QUEUE, vt=30, qty=1)] == [2]


def test_a_deleted_message_is_gone_and_an_archived_one_can_be_looked_up(client: PgmqClient) -> None:
    deleted, archived = client.send(QUEUE, {"n": 1}), client.send(QUEUE, {"n": 2})
    assert client.delete(QUEUE, [deleted, 999]) == [deleted]
    assert client.archive(QUEUE, [archived, 999]) == [archived]
    assert client.archived(QUEUE, archived) == {"n": 2}
    assert client.archived(QUEUE, deleted) is None
    assert client.read(QUEUE, vt=0, qty=10) == []


def test_a_delayed_message_waits_and_its_visibility_can_be_changed(client: PgmqClient) -> None:
    msg_id = client.send(QUEUE, {}, delay=60)
    assert client.read(QUEUE, qty=10) == []
    assert client.set_vt(QUEUE, [msg_id, 999], 0) == [msg_id]
    assert len(client.read(QUEUE, vt=30)) == 1


def test_metrics_tell_length_and_visible_length(client: PgmqClient) -> None:
    assert client.metrics(QUEUE).oldest_msg_age_sec is None
    client.send_batch(QUEUE, [{}, {}])
    client.send(QUEUE, {}, delay=60)
    client.shift_visibility(QUEUE, timedelta(seconds=30))  # PGMQ compares with the start of the transaction
    metrics = client.metrics(QUEUE)
    assert (metrics.queue_name, metrics.queue_length, metrics.queue_visible_length) == (QUEUE, 3, 2)
    assert client.purge(QUEUE) == 3
    assert client.metrics(QUEUE).queue_length == 0


def test_queues_are_listed_made_once_and_dropped(client: PgmqClient) -> None:
    client.create_queue(QUEUE)
    assert QUEUE in client.list_queues()
    client.drop_queue(QUEUE)
    assert QUEUE not in client.list_queues()


def test_sending_nothing_is_nothing(client: PgmqClient) -> None:
    assert client.send_batch(QUEUE, []) == []


@pytest.mark.django_db
def test_a_present_pgmq_is_used_and_not_installed_again() -> None:
    assert install_pgmq(connection) == "found"


@pytest.mark.django_db
def test_pgmq_is_installed_from_sql_where_there_is_no_extension() -> None:
    with connection.cursor() as cursor:
        cursor.execute("DROP SCHEMA pgmq CASCADE")
    assert install_pgmq(connection).startswith("SQL 1.")
    PgmqClient().create_queue("again")
    assert PgmqClient().send("again", {"n": 1}) == 1


@pytest.mark.django_db
def test_a_pgmq_that_lacks_what_we_need_is_refused_with_the_remedy() -> None:
    with connection.cursor() as cursor:
        cursor.execute("DROP FUNCTION pgmq.set_vt(text, bigint[], timestamptz) CASCADE")
    with pytest.raises(ConfigurationError, match=r"lacks pgmq\.set_vt\(text, bigint\[\], timestamptz\); remedy"):
        install_pgmq(connection)


def test_a_database_of_another_kind_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "vendor", "sqlite")
    with pytest.raises(ConfigurationError, match="database router"):
        require_postgresql(connection)


@pytest.mark.django_db
def test_a_postgresql_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commandbus.pgmq.install.OLDEST_POSTGRESQL", 99)
    with pytest.raises(ConfigurationError, match="needs PostgreSQL 99 or newer"):
        require_postgresql(connection)
