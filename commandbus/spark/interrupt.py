"""Ctrl-C, for what talks to Java.

Python and Java talk over a socket. Who is interrupted in the midst of that leaves stack traces all over the terminal,
or a Java that goes on alone. So the talk has a thread of its own, and Ctrl-C meets the one who waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")
AGAIN_SECONDS = 0.5


def interruptible(action: Callable[[], T], stop: Callable[[], None]) -> T:
    """What `action` answers or raises.

    On Ctrl-C, `stop` is called until the action has ended; then KeyboardInterrupt is raised. A second Ctrl-C waits for
    nothing.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(action())
        except BaseException as error:  # noqa: BLE001 - the one who waits raises it
            done.set_exception(error)

    threading.Thread(target=run, name="commandbus-spark", daemon=True).start()
    try:
        return done.result()
    except KeyboardInterrupt:
        while not done.done():
            stop()
            wait([done], AGAIN_SECONDS)
        raise
