from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

from commandbus.messages import Command, Lease, ReceivedCommand
from commandbus.worker.backlog import MOST, Backlog
from commandbus.worker.execute import Work


def work(count: int = 1) -> Work:
    now = datetime.now(UTC)
    received = ReceivedCommand(Command(uuid4(), "T", "orders", uuid4(), "r", now, {}), Lease(uuid4(), 1, 1), 1, 3, now)
    return Work("orders", None, (received,) * count)


def test_at_first_it_holds_as_much_as_can_start_at_once() -> None:
    backlog = Backlog(executors=4, vt=30)
    assert backlog.room() == 4
    backlog.put(work(3))
    assert backlog.room() == 1
    assert not backlog.is_idle()


def test_what_runs_counts_as_held_until_it_is_done() -> None:
    backlog = Backlog(executors=4, vt=30)
    backlog.put(work(3))
    taken = backlog.take()
    assert taken is not None
    assert backlog.room() == 1
    backlog.done(taken)
    assert backlog.is_idle()


def test_quick_handlers_are_fetched_for_ahead_and_slow_ones_not() -> None:
    backlog = Backlog(executors=4, vt=30)
    backlog._seconds_per_command = 0.001
    assert backlog.room() == MOST
    backlog._seconds_per_command = 1.0
    assert backlog.room() == 30  # four executors start 30 of them in a quarter of the lease
    backlog._seconds_per_command = 100.0
    assert backlog.room() == 4


def test_a_closed_backlog_starts_nothing_more() -> None:
    backlog = Backlog(executors=1, vt=30)
    waiting = work()
    backlog.put(waiting)
    assert backlog.close() == [waiting]
    assert backlog.take() is None
    assert backlog.is_idle()
    assert backlog.is_low()
