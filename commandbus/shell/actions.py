"""What an operator does from the shell: choose commands, be asked, act, and be told."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from uuid import UUID

from django.core.management.base import CommandError, OutputWrapper
from django.db import Error

from commandbus import ops
from commandbus.shell.interrupt import held_back
from commandbus.shell.progress import Progress
from commandbus.shell.sending import INTERRUPTED
from commandbus.shell.troubleshooting import rows
from commandbus.text import number, plain, plural

SHOWN = 10
SHOWN_REFUSED = 20

Run = Callable[[ops.Which, ops.Progress], ops.ActionResult]


@dataclass(frozen=True, kw_only=True)
class Job:
    verb: str
    """As in "Retry 7 commands of payments?"."""
    domain: str
    which: Sequence[UUID] | ops.TroubleshootingFilter | ops.Selection
    run: Run
    of: str = ""
    """As in "Retry 7 commands of batch … of payments?"; the domain, if it says nothing."""
    dry_run: bool = False
    yes: bool = False
    silent: bool = False

    @property
    def place(self) -> str:
        return self.of or self.domain


def act(job: Job, out: OutputWrapper, err: OutputWrapper) -> int:
    """Do it, and answer the exit code: 1 if something was refused.

    What a filter chooses is settled before the question is asked: nobody has agreed to what fails meanwhile.
    """
    which = ops.select(job.domain, job.which) if isinstance(job.which, ops.TroubleshootingFilter) else job.which
    if not isinstance(which, ops.Selection):
        which = list(dict.fromkeys(which))
    ids = list(which.messages) if isinstance(which, ops.Selection) else which
    if job.dry_run:
        return _preview(job, which, ids, out, err)
    if not ids:
        out.write(f"nothing like that is in the Troubleshooting Queue of {job.place}")
        return 0
    if not job.yes and (len(ids) > 1 or isinstance(which, ops.Selection)):
        ask(f"{job.verb.capitalize()} {plural(len(ids), 'command')} of {job.place}?", err)
    return run(job, which, len(ids), out, err)


def _in_troubleshooting(domain: str, which: ops.Which) -> list[UUID]:
    return list(ops.in_troubleshooting(domain, which).order_by("id").values_list("command_id", flat=True))


def _preview(job: Job, which: ops.Which, ids: Sequence[UUID], out: OutputWrapper, err: OutputWrapper) -> int:
    waiting = ids if isinstance(which, ops.Selection) else _in_troubleshooting(job.domain, ids)
    out.write(f"would {job.verb} {plural(len(waiting), 'command')} of {job.place}")
    if waiting:
        out.write("\n".join(rows(ops.in_troubleshooting(job.domain, waiting[:SHOWN]).order_by("id"))))
    if len(waiting) > SHOWN:
        out.write(f"… and {number(len(waiting) - SHOWN)} more")
    there = set(waiting)
    return _tell(dict.fromkeys((i for i in ids if i not in there), "it is not in the Troubleshooting Queue"), err)


def ask(question: str, err: OutputWrapper) -> None:
    """Raises CommandError if the answer is not yes."""
    if not sys.stdin.isatty():
        raise CommandError(f"{question} Nobody can be asked, because standard input is no terminal; add --yes")
    err.write(f"{question} [y/N] ", style_func=str, ending="")
    err.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("nothing was done")


def run(job: Job, which: ops.Which, total: int, out: OutputWrapper, err: OutputWrapper) -> int:
    """Do it without a question, on about `total` commands."""
    progress = Progress(err, "command", total, silent=job.silent or total == 1)
    dealt_with = 0

    def show(count: int, _: int) -> None:
        nonlocal dealt_with
        dealt_with = count
        progress.update(count, count)
        if is_interrupted():
            raise KeyboardInterrupt

    try:
        with held_back() as is_interrupted:
            result = job.run(which, show)
    except (KeyboardInterrupt, Error) as error:
        progress.end()
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else f"stopped: {plain(str(error).strip())}"
        err.write(f"{why}; {number(dealt_with)} of {plural(total, 'command')} were dealt with, and that stays")
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    progress.end()
    if not job.silent:
        out.write(f"done {number(len(result.done))}, refused {number(len(result.refused))}")
    return _tell(result.refused, err)


def _tell(refused: Mapping[UUID, str], err: OutputWrapper) -> int:
    for command_id, why in islice(refused.items(), SHOWN_REFUSED):
        err.write(f"{command_id}: {plain(why)}")
    if len(refused) > SHOWN_REFUSED:
        err.write(f"… and {number(len(refused) - SHOWN_REFUSED)} more")
    return 1 if refused else 0
