from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C wait for the end of the block, so that what it commits is counted. A second one does not wait.

    The block may ask whether somebody waits.
    """
    waiting = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: waiting  # Ctrl-C does not come here
        return

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal waiting
        if waiting:
            raise KeyboardInterrupt
        waiting = True

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: waiting
    finally:
        signal.signal(signal.SIGINT, before)
    if waiting:
        raise KeyboardInterrupt
