"""For peers whose worker is one process."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable


def in_processes(count: int, work: Callable[[], None]) -> None:
    """Run `work` in that many processes until they end. SIGTERM is passed on to each."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until there is somebody to pass it on to
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_run, args=[work]) for _ in range(count)]
    for worker in workers:
        worker.start()

    def pass_on(*_: object) -> None:
        for worker in workers:
            worker.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    for worker in workers:
        worker.join()


def _run(work: Callable[[], None]) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    work()
