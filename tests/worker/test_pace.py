from __future__ import annotations

import time

import pytest

from commandbus.worker.pace import ENOUGH, LONGEST, LONGEST_IN_VAIN, SHORTEST, Pace

ROOM = 100


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """A clock that stands still."""
    at = time.monotonic()
    monkeypatch.setattr("commandbus.worker.pace.time.monotonic", lambda: at)
    return at


def waits(*found: int, woken: bool = True) -> float:
    """How long it waits after looks that have found so many."""
    one = Pace()
    for number in found:
        one.looked(number, ROOM, woken=woken)
    return one.too_soon()


def test_the_first_look_is_at_once() -> None:
    assert Pace().too_soon() == 0


def test_a_queue_that_has_more_is_looked_at_again_at_once(now: float) -> None:
    assert waits(ROOM) == 0


def test_what_comes_slowly_waits_little(now: float) -> None:
    assert waits(1, 1, 2, 1) == pytest.approx(SHORTEST)


def test_what_comes_fast_is_gathered(now: float) -> None:
    assert waits(ENOUGH) == pytest.approx(2 * SHORTEST)
    assert waits(*[ENOUGH] * 20) == pytest.approx(LONGEST)
    assert waits(*[ENOUGH] * 20, 1) == pytest.approx(LONGEST / 2)


def test_a_worker_that_is_woken_in_vain_waits_longer(now: float) -> None:
    assert waits(0, 0, 0) > waits(0) > SHORTEST
    assert waits(*[0] * 20) == pytest.approx(LONGEST_IN_VAIN)
    assert waits(*[0] * 20, ENOUGH) == pytest.approx(LONGEST)


def test_a_poll_that_finds_nothing_changes_nothing(now: float) -> None:
    assert waits(0, 0, 0, woken=False) == 0


def test_it_is_over_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Pace()
    one.looked(1, ROOM, woken=True)
    assert one.too_soon() > 0
    later = time.monotonic() + LONGEST
    monkeypatch.setattr("commandbus.worker.pace.time.monotonic", lambda: later)
    assert one.too_soon() == 0
