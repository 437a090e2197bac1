from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from uuid import UUID

import pytest
from django.db import OperationalError

from commandbus import open_batch, seal_batch
from commandbus.messages import Status
from commandbus.models import Batch, BatchDelta, Command
from commandbus.shell import batch_watch
from commandbus.shell.batch_watch import Pace
from tests.batches.helpers import BUS, fail, finish, fold_batches, make, receive, some
from tests.helpers import environment, unreachable, wait_until
from tests.shell.helpers import Ran, Terminal, run

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def watch(batch_id: UUID, *options: str, **streams: Any) -> Ran:
    return run("commandbus_batch", "watch", "orders", str(batch_id), *options, **streams)


def between_looks(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> None:
    """What happens in the pauses of the watch. The one after the last is Ctrl-C, so that no test hangs."""
    following = iter(steps)

    def pause(seconds: float) -> None:
        step = next(following, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(time, "sleep", pause)


def test_a_watch_ends_with_the_batch_where_no_worker_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = make(2)
    between_looks(monkeypatch, lambda: finish(receive(1)), lambda: finish(receive(1)))
    ran = watch(batch_id)
    assert (ran.code, ran.out) == (0, "COMPLETED: 2 commands\n")
    assert not BatchDelta.objects.exists()


def test_a_watch_of_a_batch_that_has_ended_ends_at_once() -> None:
    batch_id = make(1)
    finish(receive())
    assert watch(batch_id).code == 0
    assert watch(batch_id).out == "COMPLETED: 1 command\n"


def test_failures_end_a_watch_with_1_and_are_counted() -> None:
    batch_id = make(3)
    one, other, third = receive()
    finish([one])
    finish([other], Status.FAILED)
    finish([third], Status.CANCELED)
    ran = watch(batch_id)
    assert (ran.code, ran.out) == (1, "COMPLETED_WITH_FAILURES: 3 commands, 1 failed, 1 canceled\n")


def test_a_terminal_shows_a_bar_of_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = make(4)
    one, other, *rest = receive()

    def some_end() -> None:
        finish([one], Status.FAILED)
        fail([other])

    between_looks(monkeypatch, some_end, lambda: finish(rest))
    ran = watch(batch_id, stderr=Terminal())
    assert ran.code == 130  # one of them waits for an operator
    assert "\r\033[K[                              ]   0 %  0 of 4 ended" in ran.err
    assert "\r\033[K[#######                       ]  25 %  1 of 4 ended, " in ran.err
    assert "/s, " in ran.err
    assert " left, 1 failed, 1 in troubleshooting" in ran.err
    assert "]  75 %  3 of 4 ended, " in ran.err
    assert "1 failed, 1 in troubleshooting, the rest waits for an operator" in ran.err


def test_a_bar_stays_on_one_line_of_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    batch_id = make(2)
    finish(receive(1), Status.FAILED)
    between_looks(monkeypatch, lambda: finish(receive()))
    ran = watch(batch_id, stderr=Terminal())
    assert {len(text) for text in ran.err.rstrip("\n").split("\r\033[K")[1:]} == {49}


def test_an_open_batch_says_that_it_waits_to_be_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = open_batch("orders", 4)
    BUS.send("orders", some(1), batch_id=batch_id)
    finish(receive())
    between_looks(monkeypatch, lambda: seal_batch("orders", batch_id, allow_incomplete=True))
    ran = watch(batch_id, stderr=Terminal())
    assert ran.code == 0
    assert "25 %  1 of 4 ended, not sealed" in ran.err
    assert "100 %  1 of 1 ended" in ran.err


def test_an_empty_batch_can_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = open_batch("orders")
    between_looks(monkeypatch, lambda: seal_batch("orders", batch_id))
    ran = watch(batch_id, stderr=Terminal())
    assert (ran.code, ran.out) == (0, "COMPLETED: 0 commands\n")


def test_elsewhere_it_prints_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = make(4)
    steps = [lambda: finish(receive(1)), lambda: None, lambda: finish(receive(1)), lambda: finish(receive(2))]
    between_looks(monkeypatch, *steps)
    monkeypatch.setattr(batch_watch, "LINE_SECONDS", 0)
    ran = watch(batch_id)
    assert [said.split(" ended")[0] for said in ran.err.splitlines()] == [
        "0 of 4",
        "1 of 4",
        "1 of 4",
        "2 of 4",
        "4 of 4",
    ]
    assert "\r" not in ran.err
    batch_id = make(4)
    between_looks(monkeypatch, *steps)
    monkeypatch.setattr(batch_watch, "LINE_SECONDS", 3600)
    assert [said.split(" ended")[0] for said in watch(batch_id).err.splitlines()] == ["0 of 4", "4 of 4"]


@pytest.mark.parametrize("stream", [Terminal, None])
def test_ctrl_c_ends_the_watch_and_not_the_batch(monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    batch_id = make(1)
    between_looks(monkeypatch)
    ran = watch(batch_id, stderr=None if stream is None else stream())
    assert (ran.code, ran.out) == (130, "")
    assert ran.err.replace("\033[31;1m", "").replace("\033[0m", "").endswith("\ninterrupted; the batch goes on\n")


def test_ctrl_c_waits_for_the_end_of_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = make(1)
    finish(receive())
    real = fold_batches

    def interrupted(using: str) -> int:
        signal.raise_signal(signal.SIGINT)
        return real(using)

    monkeypatch.setattr(batch_watch, "fold_batches", interrupted)
    assert watch(batch_id).code == 130
    assert Batch.objects.get().status == "COMPLETED"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_verbosity_0_only_has_an_exit_code() -> None:
    batch_id = make(1)
    finish(receive(), Status.FAILED)
    assert watch(batch_id, "-v", "0", stderr=Terminal()) == Ran(1, "", "")


def test_a_watch_outlives_a_database_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = make(1)
    real = fold_batches
    between_looks(monkeypatch, lambda: None, lambda: finish(receive()))
    looks = []

    def away(using: str) -> int:
        looks.append(using)
        if len(looks) == 2:
            raise OperationalError("connection \x1brefused\nfor a while")
        return real(using)

    monkeypatch.setattr(batch_watch, "fold_batches", away)
    ran = watch(batch_id)
    assert ran.code == 0
    assert "the database is away: connection \\x1brefused" in ran.err


@pytest.mark.django_db(transaction=True)
def test_a_watch_on_a_terminal_outlives_a_database_that_is_really_away(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = make(1)
    outage = ExitStack()
    between_looks(
        monkeypatch,
        lambda: outage.enter_context(unreachable("default")),
        outage.close,
        lambda: finish(receive()),
    )
    with outage:
        ran = watch(batch_id, stderr=Terminal())
    assert (ran.code, ran.out) == (0, "COMPLETED: 1 command\n")
    assert "\r\033[Kthe database is away: " in ran.err


def test_a_database_that_is_away_from_the_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(using: str) -> int:
        raise OperationalError("refused")

    batch_id = make(1)
    monkeypatch.setattr(batch_watch, "fold_batches", away)
    ran = watch(batch_id)
    assert ran.code == 1
    assert "the database has refused or cannot be reached: refused" in ran.err


def test_a_batch_that_is_pruned_meanwhile_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = make(1)

    def prune() -> None:
        Command.objects.all().delete()
        Batch.objects.all().delete()

    between_looks(monkeypatch, prune)
    ran = watch(batch_id, stderr=Terminal())
    assert ran.code == 1
    assert f"\nCommandError: there is no batch {batch_id} in domain 'orders'" in ran.err


def test_a_command_in_the_end_that_could_not_be_sent_is_told() -> None:
    batch_id = make(1)
    finish(receive())
    watch(batch_id)
    Batch.objects.update(callback_error="its queue is gone")
    ran = watch(batch_id)
    assert ran.code == 0
    assert "its on_complete command could not be sent: its queue is gone" in ran.err


@pytest.mark.parametrize(
    ("seen", "per_second"),
    [
        ([], None),
        ([(100.0, 50)], None),
        ([(100.0, 50), (110.0, 70)], 2),
        ([(100.0, 50), (110.0, 70), (120.0, 70)], 1),
        ([(100.0, 50), (110.0, 70), (120.0, 70), (130.0, 70)], 0),
        ([(100.0, 50), (110.0, 10)], 0),  # a repair has counted anew
    ],
)
def test_the_pace_is_that_of_the_last_looks(seen: list[tuple[float, int]], per_second: float | None) -> None:
    pace = Pace(looks=3)
    for at, count in seen:
        pace.add(at, count)
    assert pace.per_second == per_second


def really_watch(batch_id: UUID) -> tuple[subprocess.Popen[str], str]:
    """The process, and the first line that it has printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "django", "commandbus_batch", "watch", "orders", str(batch_id)],
        env=environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    return process, process.stderr.readline()


@pytest.mark.django_db(transaction=True)
def test_ctrl_c_ends_a_real_watch_without_a_traceback() -> None:
    process, first = really_watch(make(1))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, ""), err
    assert first == "0 of 1 ended\n"
    assert err == "interrupted; the batch goes on\n"


@pytest.mark.django_db(transaction=True)
def test_a_real_watch_ends_when_the_batch_does() -> None:
    process, _ = really_watch(make(2))
    finish(receive(), Status.FAILED)
    out, err = process.communicate()
    assert (process.returncode, out) == (1, "COMPLETED_WITH_FAILURES: 2 commands, 2 failed\n"), err
    wait_until(lambda: Batch.objects.get().status == "COMPLETED_WITH_FAILURES")
