"""Functions of this process that are called when a batch has completed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from uuid import UUID

import pytest
from django.db import OperationalError, transaction

from commandbus import (
    BatchMetadata,
    InvalidCommandError,
    callbacks,
    open_batch,
    seal_batch,
    uuid7,
)
from tests.batches.helpers import (
    batch,
    finish,
    make,
    on_complete,
    receive,
)
from tests.helpers import PATIENCE, environment, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_function_of_this_process_is_called_with_the_batch() -> None:
    heard: list[BatchMetadata] = []
    batch_id = make(1, on_complete=heard.append)
    assert heard == []
    finish(receive())
    wait_until(lambda: heard)
    assert [(one.batch_id, one.status) for one in heard] == [(batch_id, "COMPLETED")]
    wait_until(lambda: callbacks._thread is None)


def test_a_coroutine_is_awaited_and_an_error_of_one_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    heard = threading.Event()

    async def hear(batch: BatchMetadata) -> None:
        heard.set()

    def break_down(batch: BatchMetadata) -> None:
        raise ZeroDivisionError

    bad = make(1, on_complete=break_down)
    make(1, on_complete=hear)
    finish(receive())
    assert heard.wait(PATIENCE)
    wait_until(lambda: f"the on_complete function of batch {bad} failed" in caplog.text)


def test_a_function_is_not_called_for_a_batch_that_was_rolled_back() -> None:
    with transaction.atomic():
        make(1, on_complete=lambda batch: None)
        transaction.set_rollback(True)
    assert callbacks._waiting == {}


def test_a_database_that_is_away_is_outlived_and_what_is_pruned_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[UUID] = []
    callbacks.forget_all()
    batch_id, pruned = make(1), uuid7()
    monkeypatch.setattr(callbacks, "_thread", threading.current_thread())  # we look ourselves
    for one in (batch_id, pruned):
        callbacks.call_when_complete("default", one, lambda batch: heard.append(batch.batch_id))
    finish(receive())

    def away(using: str) -> None:
        raise OperationalError("away")

    with monkeypatch.context() as patch:
        patch.setattr(callbacks, "fold_batches", away)
        assert callbacks.run_once() == 0
    assert callbacks.run_once() == 1
    assert (heard, callbacks._waiting) == ([batch_id], {})
    monkeypatch.setattr(callbacks, "_thread", None)


def test_a_forked_process_leaves_the_functions_to_its_parent() -> None:
    script = """
import os, threading, uuid
import django
django.setup()
from commandbus import callbacks
callbacks._thread = threading.current_thread()
callbacks.call_when_complete("default", uuid.uuid4(), print)
child = os.fork()
if not child:
    os._exit(callbacks._waiting != {} or callbacks._thread is not None)
assert len(callbacks._waiting) == 1
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True, timeout=PATIENCE)


@pytest.mark.parametrize("how", ["exit", "cancel", "break"])
def test_whatever_one_function_raises_the_next_is_called(how: str, caplog: pytest.LogCaptureFixture) -> None:
    heard = threading.Event()

    def leave(batch: BatchMetadata) -> None:
        raise SystemExit

    async def give_up(batch: BatchMetadata) -> None:
        raise asyncio.CancelledError

    def break_down(batch: BatchMetadata) -> None:
        raise ZeroDivisionError

    bad = make(1, on_complete={"exit": leave, "cancel": give_up, "break": break_down}[how])
    finish(receive())
    wait_until(lambda: f"the on_complete function of batch {bad} failed" in caplog.text)
    make(1, on_complete=lambda batch: heard.set())
    finish(receive())
    assert heard.wait(PATIENCE)


def test_the_thread_goes_on_after_an_error_that_nobody_thought_of(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = threading.Event()
    failed = threading.Event()
    run_once = callbacks.run_once

    def once() -> int:
        if not failed.is_set():
            failed.set()
            raise ZeroDivisionError
        return run_once()

    monkeypatch.setattr(callbacks, "run_once", once)
    make(1, on_complete=lambda batch: heard.set())
    finish(receive())
    assert heard.wait(PATIENCE)
    assert failed.is_set()


def test_all_functions_of_a_batch_are_called_and_the_same_once() -> None:
    heard: list[str] = []

    def hear(batch: BatchMetadata) -> None:
        heard.append("first")

    batch_id = uuid7()
    for function in (hear, hear, lambda batch: heard.append("second")):
        open_batch("orders", batch_id=batch_id, on_complete=function)
    seal_batch("orders", batch_id)
    wait_until(lambda: callbacks._thread is None)
    assert sorted(heard) == ["first", "second"]


def test_a_thread_that_cannot_be_started_is_no_error_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[UUID] = []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        first = make(1, on_complete=lambda batch: heard.append(batch.batch_id))
    assert f"no thread could be started for the function of batch {first}" in caplog.text
    second = make(1, on_complete=lambda batch: heard.append(batch.batch_id))
    finish(receive())
    wait_until(lambda: callbacks._thread is None)
    assert set(heard) == {first, second}


def test_a_function_needs_a_commit_that_django_knows_of() -> None:
    transaction.set_autocommit(False)
    try:
        with pytest.raises(InvalidCommandError, match="while autocommit is off on database 'default'"):
            make(1, on_complete=lambda batch: None)
        with pytest.raises(InvalidCommandError, match=r"or create the batch in transaction\.atomic\(\)"):
            open_batch("orders", on_complete=lambda batch: None)
        make(1, on_complete=on_complete())
        with transaction.atomic():
            make(1, on_complete=lambda batch: None)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


def test_opening_a_batch_that_has_completed_calls_no_function() -> None:
    batch_id = uuid7()
    open_batch("orders", batch_id=batch_id)
    seal_batch("orders", batch_id)
    assert batch(batch_id).is_complete
    open_batch("orders", batch_id=batch_id, on_complete=lambda batch: None)
    assert callbacks._waiting == {}
