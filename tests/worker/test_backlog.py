from __future__ import annotations

import time
from datetime import UTC, datetime
from uuid import uuid4

import pytest

from commandbus.messages import Command, Lease, ReceivedCommand
from commandbus.worker.backlog import MOST, Backlog
from commandbus.worker.work import Work


def work(count: int = 1) -> Work:
    now = datetime.now(UTC)
    received = ReceivedCommand(Command(uuid4(), "T", "orders", uuid4(), "r", now, {}), Lease(uuid4(), 1, 1), 1, 3, now)
    return Work("orders", None, (received,) * count)


def test_at_first_it_holds_as_much_as_can_start_at_once() -> None:
    backlog = Backlog(executors=4)
    assert backlog.room() == 4
    backlog.put([work(3)])
    assert backlog.room() == 1
    assert not backlog.is_idle()


def test_what_runs_counts_as_held_until_it_is_done() -> None:
    backlog = Backlog(executors=4)
    backlog.put([work(3)])
    taken = backlog.take()
    assert taken is not None
    assert backlog.room() == 1
    backlog.done(taken)
    assert backlog.is_idle()


def test_quick_handlers_are_fetched_for_ahead_and_slow_ones_not() -> None:
    backlog = Backlog(executors=4)
    backlog._seconds = {"T": (0.001, time.monotonic())}
    assert backlog.room() == MOST
    backlog._seconds["slow"] = (0.1, time.monotonic())
    assert backlog.room() == 40  # four executors start as many in a second
    backlog._seconds["slow"] = (100.0, time.monotonic())
    assert backlog.room() == 4
    backlog._seconds["slow"] = (100.0, time.monotonic() - 60)
    assert backlog.room() == MOST  # the slow ones have not been seen for a while


def test_what_has_waited_too_long_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    backlog = Backlog(executors=2, largest_batch=10)
    works = [work() for _ in range(10)]
    backlog.put(works)
    backlog.take()
    backlog.take()
    assert backlog.surplus() == []
    now = time.monotonic() + 1.1
    monkeypatch.setattr("time.monotonic", lambda: now)
    assert backlog.surplus() == works[2:]
    assert backlog.room() == 0  # those that run are slow
    assert backlog.surplus() == []


def test_what_did_not_run_says_nothing_about_the_speed() -> None:
    backlog = Backlog(executors=2)
    backlog.put([work()])
    taken = backlog.take()
    assert taken is not None
    backlog.done(taken, ran=False)
    assert backlog._seconds == {}


def test_a_closed_backlog_starts_nothing_more() -> None:
    backlog = Backlog(executors=1)
    waiting = work()
    backlog.put([waiting])
    assert backlog.close() == [waiting]
    assert backlog.take() is None
    assert backlog.is_idle()
    assert backlog.is_low()
