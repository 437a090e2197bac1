"""What an operator does with batches: cancel, retry, seal, repair."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from django.core.management.base import OutputWrapper
from django.db import Error

from commandbus import ops
from commandbus.batches import repair_batches, require_batch, seal_batch
from commandbus.exceptions import BatchRefusedError, CommandBusError
from commandbus.messages import BatchMetadata
from commandbus.shell.actions import Job, Run, act, ask, run
from commandbus.shell.interrupt import held_back
from commandbus.shell.progress import Progress
from commandbus.shell.sending import INTERRUPTED
from commandbus.shell.table import ago
from commandbus.text import number, plain, plural, table


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    domain: str
    batch_id: UUID
    operator: str
    reason: str | None = None
    dry_run: bool = False
    yes: bool = False
    silent: bool = False

    @property
    def place(self) -> str:
        return f"batch {self.batch_id} of {self.domain}"


def cancel(job: BatchJob, out: OutputWrapper, err: OutputWrapper, *, troubleshooting: bool = False) -> int:
    """Answers the exit code: 1 if a command was refused. Raises BatchRefusedError if all have ended."""
    batch = require_batch(job.domain, job.batch_id)
    if batch.is_complete:  # before somebody is asked
        raise BatchRefusedError(f"batch {batch.batch_id} cannot be canceled: its status is {batch.status}")
    waiting = ops.waiting_in(job.domain, job.batch_id)
    troubled = batch.in_troubleshooting_count if troubleshooting else 0
    what = f"{job.place}: {plural(len(waiting.messages), 'waiting command')}"
    if troubled:
        what += f", {number(troubled)} in troubleshooting"
    if job.dry_run:
        out.write(f"would cancel {what}")
        return 0
    if not job.yes:
        ask(f"Cancel {what}?", err)
    is_done = False

    def cancel_all(_: ops.Which, progress: ops.Progress) -> ops.ActionResult:
        nonlocal is_done
        result = ops.cancel_batch(
            job.domain,
            job.batch_id,
            job.reason or "",
            operator=job.operator,
            troubleshooting=troubleshooting,
            progress=progress,
        )
        is_done = True
        return result

    code = run(_of_commands(job, "cancel", waiting, cancel_all), waiting, len(waiting.messages) + troubled, out, err)
    if is_done and not job.silent:
        _tell_what_is_left(require_batch(job.domain, job.batch_id), out)
    return code


def _tell_what_is_left(batch: BatchMetadata, out: OutputWrapper) -> None:
    running, troubled = batch.waiting_count, batch.in_troubleshooting_count
    left = [f"{number(running)} that {'runs' if running == 1 else 'run'}, and may be tried again"] if running else []
    left += [f"{number(troubled)} in troubleshooting"] if troubled else []
    if left:
        out.write(f"left: {', '.join(left)}")


def retry(job: BatchJob, out: OutputWrapper, err: OutputWrapper) -> int:
    """Answers the exit code: 1 if a command was refused. What fails while somebody is asked is not part of it."""
    require_batch(job.domain, job.batch_id)

    def retry_all(which: ops.Which, progress: ops.Progress) -> ops.ActionResult:
        by = {"operator": job.operator, "reason": job.reason}
        return ops.operator_retry_many(job.domain, which, progress=progress, **by)

    return act(_of_commands(job, "retry", ops.troubled_in(job.domain, job.batch_id), retry_all), out, err)


def _of_commands(job: BatchJob, verb: str, which: ops.Selection, action: Run) -> Job:
    return Job(
        verb=verb,
        domain=job.domain,
        which=which,
        run=action,
        of=job.place,
        dry_run=job.dry_run,
        yes=job.yes,
        silent=job.silent,
    )


def seal(job: BatchJob, out: OutputWrapper, *, allow_incomplete: bool = False) -> None:
    before = require_batch(job.domain, job.batch_id)
    batch = seal_batch(job.domain, job.batch_id, allow_incomplete=allow_incomplete, operator=job.operator)
    if job.silent:
        return
    if before.sealed_at is None:
        out.write(f"sealed, with {plural(batch.total_count, 'command')}")
    else:
        out.write(f"it was sealed before, at {ago(before.sealed_at)}")


def repair(
    domain: str | None, out: OutputWrapper, err: OutputWrapper, *, operator: str | None = None, silent: bool = False
) -> int:
    """All batches of a domain, or of all domains; answers the exit code: 1 if one could not be repaired."""
    progress = Progress(err, "batch", None, silent=silent)
    looked_at = total = 0

    def show(count: int, of: int) -> None:
        nonlocal looked_at, total
        looked_at, total, progress.total = count, of, of
        progress.update(count, count)
        if is_interrupted():
            raise KeyboardInterrupt

    try:
        with held_back() as is_interrupted:
            repairs = repair_batches(domain, operator=operator, progress=show)
    except CommandBusError:
        progress.clear()
        raise
    except (KeyboardInterrupt, Error) as error:
        progress.end()
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else f"stopped: {plain(str(error).strip())}"
        stays = "were looked at, and what was corrected stays"
        err.write(f"{why}; {number(looked_at)} of {plural(total, 'batch')} {stays}")
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    progress.end()
    if not silent:
        cells = [(str(one.batch_id), one.what, plain(one.before or "-"), plain(one.after or "-")) for one in repairs]
        text = table(("BATCH", "WHAT", "BEFORE", "AFTER"), cells) if cells else ["nothing had to be corrected"]
        out.write("\n".join(text))
    return int(any(one.what == "error" for one in repairs))
