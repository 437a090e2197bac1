from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from django.db import connection, connections

from commandbus.worker.alarm import Alarm
from tests.helpers import PATIENCE, listening, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    """That listens on the connection of this thread."""
    alarm = Alarm({"default": ["news", "more news"]})
    alarm.listen()
    yield alarm
    alarm.close()


def execute(statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


def elsewhere(statement: str) -> None:
    """Run it in a thread, that has a connection of its own."""

    def run() -> None:
        try:
            execute(statement)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_it_waits_for_so_long(alarm: Alarm) -> None:
    started_at = time.monotonic()
    assert not alarm.wait(0.2)
    assert time.monotonic() - started_at >= 0.2


def test_another_thread_sets_it_until_it_is_cleared(alarm: Alarm) -> None:
    threading.Timer(0.05, alarm.set).start()
    assert alarm.wait(PATIENCE)
    alarm.set()
    assert alarm.is_set()
    assert not alarm.was_notified
    assert alarm.wait(PATIENCE)
    alarm.clear()
    alarm.clear()
    assert not alarm.is_set()
    assert not alarm.wait(0.01)


def test_a_notification_sets_it(alarm: Alarm) -> None:
    elsewhere('NOTIFY "more news"')
    assert alarm.wait(PATIENCE)
    alarm.clear()
    elsewhere("NOTIFY other")
    assert not alarm.wait(0.1)


def test_also_one_that_comes_while_the_connection_is_used(alarm: Alarm) -> None:
    elsewhere("NOTIFY news")

    def is_set_by_using_it() -> bool:
        execute("SELECT 2")
        return alarm.is_set()

    wait_until(is_set_by_using_it)


def end_session() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        [pid] = cursor.fetchone()
    elsewhere(f"SELECT pg_terminate_backend({pid})")


def test_a_lost_connection_sets_it_because_something_may_have_been_missed(
    alarm: Alarm, caplog: pytest.LogCaptureFixture
) -> None:
    end_session()
    assert alarm.wait(PATIENCE)
    assert "listener.lost database=default" in caplog.text
    alarm.clear()
    alarm.listen()
    elsewhere("NOTIFY news")
    assert alarm.wait(PATIENCE)


def test_a_connection_that_was_closed_by_others_is_replaced(alarm: Alarm) -> None:
    connection.close()
    assert not alarm.wait(0.01)
    alarm.listen()
    elsewhere("NOTIFY news")
    assert alarm.wait(PATIENCE)


def test_a_connection_that_went_back_to_its_pool_is_left_alone(alarm: Alarm) -> None:
    connection.connection, pooled = None, connection.connection  # as Django does it
    try:
        elsewhere("NOTIFY news")
        assert not alarm.wait(0.1)
        alarm.close()
        assert [row[0] for row in pooled.execute("SELECT pg_listening_channels()")] == ["news", "more news"]
    finally:
        pooled.close()


def test_a_silent_connection_is_asked_whether_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Alarm, "PING_SECONDS", 0.01)
    asked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query = 'SELECT 1'"
    with listening("default", ["news"]), connection.cursor() as cursor:

        def is_asked() -> bool:
            cursor.execute(asked)
            return bool(cursor.fetchone()[0])

        wait_until(is_asked)


def test_one_that_does_not_answer_is_given_up(alarm: Alarm) -> None:
    end_session()
    alarm._alive_at["default"] -= Alarm.PING_SECONDS
    alarm._ping()
    assert alarm.is_set()
    assert connection.connection is None


def test_whoever_cannot_be_reached_is_left_to_polling(alarm: Alarm, caplog: pytest.LogCaptureFixture) -> None:
    connection.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(connection.settings_dict, "PORT", "1")
        alarm.listen()
        alarm.listen()  # it does not try again at once
    assert caplog.text.count("listener.lost") == 1
    alarm.clear()
    assert not alarm.wait(0.01)


def test_afterwards_the_connection_hears_nothing_and_setting_it_does_nothing(alarm: Alarm) -> None:
    alarm.close()
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM pg_listening_channels()")
        assert cursor.fetchall() == []
    alarm.set()
    assert not alarm.is_set()


def test_two_threads_listen_on_connections_of_their_own() -> None:
    with listening("default", ["first"]) as first, listening("default", ["second"]) as second:
        execute("NOTIFY second")
        wait_until(second.is_set)
        assert not first.is_set()
