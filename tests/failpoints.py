"""Places in a worker's life at which a test can have its process killed or stopped: exactly there, and once.

COMMANDBUS_FAILPOINT = "<point>:<signal>:<file>"; the file is made when the point was reached. Nothing of this is in the
package: the points are put around its functions.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from django.db import connections

POINTS = (
    "after_read",
    "before_handler",
    "in_handler",
    "before_finish",
    "between_finish_and_commit",
    "after_commit",
)
FOLD_POINTS = ("before_fold", "after_fold")
"""Around the call that completes a batch."""
GROUP_POINTS = ("in_group", "group_finished")
"""Where several commands share a transaction: after the first handler, and before the commit."""


def install() -> None:
    if "COMMANDBUS_FAILPOINT" not in os.environ:
        return
    from commandbus.transitions import PostgresTransitions
    from commandbus.worker import execute, folder, together
    from commandbus.worker.worker import Worker

    around(PostgresTransitions, "receive", after=lambda result: result and reached("after_read"))
    around(execute, "call", before=lambda: reached("before_handler"))
    around(
        PostgresTransitions,
        "finish",
        before=lambda: reached("before_finish"),
        after=lambda _: is_in_transaction() and reached("between_finish_and_commit"),
    )
    around(execute.Executor, "_run_in_transaction", after=lambda _: reached("after_commit"))
    around(Worker, "_told", before=lambda: reached("after_commit"))
    around(folder, "fold_batches", before=_all_counted, after=lambda completed: completed and reached("after_fold"))
    around(together, "_run_one", after=lambda _: reached("in_group"))
    around(PostgresTransitions, "finish", after=lambda done: len(done) > 1 and reached("group_finished"))


def _all_counted() -> None:
    from commandbus.models import BatchDelta

    if os.environ["COMMANDBUS_FAILPOINT"].startswith("before_fold"):
        counted = sum(BatchDelta.objects.values_list("completed_count", flat=True))
        if counted:
            reached("before_fold")


def is_in_transaction() -> bool:
    """In whatever database the handler's transaction is."""
    return any(connection.in_atomic_block for connection in connections.all(initialized_only=True))


def reached(point: str) -> bool:
    """Answers whether somebody wanted to know; if the signal was to kill, nobody will."""
    wanted, number, path = os.environ.get("COMMANDBUS_FAILPOINT", "::").split(":")
    if point == wanted:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        # To this thread, which then does not get any further. Another might notice a little later.
        signal.pthread_kill(threading.get_ident(), getattr(signal, number))
    return point == wanted


def around(
    owner: Any, name: str, before: Callable[[], Any] | None = None, after: Callable[[Any], Any] | None = None
) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before:
            before()
        result = original(*args, **kwargs)
        if after:
            after(result)
        return result

    setattr(owner, name, wrapped)
