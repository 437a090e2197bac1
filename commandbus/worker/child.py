"""The entry of a spawned worker process. Imports nothing that needs Django, because Django is set up in here."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import MutableSequence
from typing import TYPE_CHECKING
from uuid import UUID

from commandbus.worker.options import Ending, WorkerOptions

if TYPE_CHECKING:
    from commandbus.worker.worker import Worker

EXIT_CODES = {Ending.STOPPED: 0, Ending.EMPTY: 0, Ending.RECYCLE: 64, Ending.ASKED: 65}

BLOCKED = {signal.SIGINT, signal.SIGTERM}
"""Signals that the supervisor blocks while it spawns, so that none can hit a process that is not ready for it."""


def run(options: WorkerOptions, node_id: UUID, board: MutableSequence[int], verbosity: int) -> None:
    import django

    django.setup()
    from commandbus.worker.board import Board
    from commandbus.worker.log import show_log
    from commandbus.worker.worker import Worker

    show_log(verbosity)
    worker = Worker(options, node_id=node_id, board=Board(board))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor passes it on
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=worker.stop).start())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
    threading.Thread(target=_end_with_the_supervisor, args=[worker], daemon=True).start()
    gc.collect()
    gc.freeze()  # what was imported stays; every full collection would look through all of it
    code = EXIT_CODES[worker.run()]
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of handlers that were written off may go on for long, and Python would wait for some


def _end_with_the_supervisor(worker: Worker) -> None:
    supervisor = multiprocessing.parent_process()
    if supervisor is not None:
        supervisor.join()
        worker.stop()
