"""Batches: commands that are created together, counted together, and have an end together.

A batch is opened, commands are sent into it, and it is sealed. `create_batch` does the three in one transaction. Where
one cannot be held that long, `open_batch`, `add_to_batch` and `seal_batch` do it one by one, from as many processes as
there are.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial, wraps
from itertools import islice
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from asgiref.sync import sync_to_async
from django.db import DatabaseError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from commandbus import install
from commandbus.api import CHUNK, checked, database_for_sending, database_of, require_sent, try_send, uuid_of
from commandbus.callbacks import BatchCallback, call_when_complete
from commandbus.exceptions import (
    BatchTimeoutError,
    CommandBusError,
    DuplicateCommandError,
    InvalidCommandError,
    UncommittedBatchError,
    UnknownBatchError,
)
from commandbus.folding import fold_after_commit, fold_on
from commandbus.ids import uuid7
from commandbus.messages import BatchCommand, BatchMetadata, BatchRepair, BatchStatus, NewCommand, Status, storable
from commandbus.models import Batch, Command
from commandbus.models.command import RARE
from commandbus.transitions import PostgresTransitions
from commandbus.waiting import Wait, await_, in_transaction, wait

P = ParamSpec("P")
R = TypeVar("R")


def create_batch(
    domain: str,
    commands: Iterable[BatchCommand],
    *,
    name: str | None = None,
    custom_data: Mapping[str, Any] | None = None,
    on_complete: BatchCommand | BatchCallback | None = None,
    outside_transaction: bool = False,
) -> UUID:
    """Create a batch with all its commands, or nothing, in the current transaction; answer its id.

    Takes any iterable and sends it in chunks. One command that is not valid, or was ever sent before, is an error, and
    so is a batch without commands.

    `on_complete`: a command, sent when all commands of the batch have ended, with a summary of the batch under "batch"
    in its data; or a function, called with the BatchMetadata, if this process still lives then.
    """
    using = database_for_sending(domain, outside_transaction=outside_transaction)
    _require_known_commit(using, on_complete)
    batch_id = uuid7()
    with transaction.atomic(using=using):
        _open(domain, using, batch_id, name, custom_data, None, on_complete)
        if not _send_all(domain, using, batch_id, commands, only_new=True):
            raise InvalidCommandError(
                f"a batch needs at least one command, and the one for domain {domain!r} got none; "
                f"if there may be none, use open_batch and seal_batch"
            )
        PostgresTransitions(using).seal_batch(domain, batch_id)
    return batch_id


def open_batch(
    domain: str,
    total: int | None = None,
    *,
    name: str | None = None,
    custom_data: Mapping[str, Any] | None = None,
    on_complete: BatchCommand | BatchCallback | None = None,
    batch_id: UUID | None = None,
    outside_transaction: bool = False,
) -> UUID:
    """Create a batch that commands can be added to, and that cannot complete before it is sealed; answer its id.

    `total`: how many commands it shall have. `seal_batch` refuses another number. With a `batch_id` of your own,
    opening it again with the same content does nothing.
    """
    if total is not None and (isinstance(total, bool) or not isinstance(total, int) or not 0 <= total < 2**31):
        raise InvalidCommandError(f"total must be a number of commands, 0 or more, not {total!r:.100}")
    using = database_for_sending(domain, outside_transaction=outside_transaction)
    _require_known_commit(using, on_complete)
    batch_id = uuid7() if batch_id is None else uuid_of(batch_id, "batch_id")
    with transaction.atomic(using=using):
        _open(domain, using, batch_id, name, custom_data, total, on_complete)
    return batch_id


def add_to_batch(
    domain: str, batch_id: UUID, commands: Iterable[BatchCommand], *, outside_transaction: bool = False
) -> int:
    """Send commands as part of an open batch, all or none, in the current transaction; answer how many are new.

    To add the same again does nothing, also after the batch was sealed. What was sent as part of something else is an
    error, and so is a new command for a sealed batch.
    """
    using = database_for_sending(domain, outside_transaction=outside_transaction)
    with transaction.atomic(using=using):
        return _send_all(domain, using, uuid_of(batch_id, "batch_id"), commands, only_new=False)


def seal_batch(
    domain: str, batch_id: UUID, *, allow_incomplete: bool = False, operator: str | None = None
) -> BatchMetadata:
    """Let a batch complete when its commands have ended; nothing can be added any more. To seal it again does nothing.

    Waits for those who are just adding; so a seal belongs in a transaction of its own, or two who have added something
    and seal might wait for each other. Raises BatchRefusedError if the batch has another number of commands than it
    was opened with, unless `allow_incomplete`.
    """
    using, batch_id = database_of(domain), uuid_of(batch_id, "batch_id")
    by = None if operator is None else storable(operator)
    with transaction.atomic(using=using):
        PostgresTransitions(using).seal_batch(domain, batch_id, allow_incomplete=allow_incomplete, operator=by)
    fold_after_commit(using)
    return require_batch(domain, batch_id)


def get_batch(domain: str, batch_id: UUID) -> BatchMetadata | None:
    """A batch as it is now; None if there is none of this id."""
    batches = Batch.objects.using(database_of(domain)).filter(batch_id=uuid_of(batch_id, "batch_id"))
    return next((batch for batch in batches.as_they_are() if batch.domain == domain), None)


def require_batch(domain: str, batch_id: UUID) -> BatchMetadata:
    batch = get_batch(domain, batch_id)
    if batch is None:
        raise _unknown(domain, batch_id)
    return batch


def list_batches(
    domain: str, *, status: BatchStatus | str | None = None, limit: int = 100, offset: int = 0
) -> list[BatchMetadata]:
    """The newest first."""
    batches = Batch.objects.using(database_of(domain)).filter(domain=domain)
    if status is not None:
        batches = batches.with_status(BatchStatus(status))
    return batches.order_by("-created_at", "-batch_id")[offset : offset + limit].as_they_are()


def list_batch_commands(
    domain: str, batch_id: UUID, *, status: Status | str | None = None, limit: int = 100, offset: int = 0
) -> list[Command]:
    """In the order in which they were sent."""
    batch = require_batch(domain, batch_id)
    commands = Command.objects.using(database_of(domain)).filter(batch_id=batch.batch_id)
    if status is not None:
        field = "rare_status" if Status(status) in RARE else "status"
        commands = commands.filter(**{field: Status(status).value})
    return list(commands.order_by("id")[offset : offset + limit])


def wait_for_batch(domain: str, batch_id: UUID, timeout: float) -> BatchMetadata:
    """Wait up to `timeout` seconds until a batch has completed, and answer it.

    Raises BatchTimeoutError, UnknownBatchError, and at once UncommittedBatchError if it was created in the transaction
    that is open here, because no worker can see it before the commit.
    """
    return wait(_BatchWait(domain, batch_id, timeout))


async def await_for_batch(domain: str, batch_id: UUID, timeout: float) -> BatchMetadata:
    """As wait_for_batch; no thread is held meanwhile."""
    return await await_(_BatchWait(domain, batch_id, timeout))


def repair_batches(
    domain: str | None = None,
    *,
    operator: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[BatchRepair]:
    """Count the commands of all batches that are not complete, and correct what differs; answer what that was.

    Also sends on_complete commands that could not be sent, under a new id if theirs was taken; what still cannot is in
    the answer, with the reason as before. Of one domain, or of all. Nobody has to stop for it. A batch that PostgreSQL
    cannot repair stops it only if the connection is lost; its error is in the answer.
    """
    domains = install.domains() if domain is None else [domain]
    places = [
        (name, using, batch_id)
        for name, using in [(name, database_of(name)) for name in domains]
        for batch_id in Batch.objects.using(using).in_need_of_repair(name).values_list("batch_id", flat=True)
    ]
    by = None if operator is None else storable(operator)
    repairs: list[BatchRepair] = []
    for number, (name, using, batch_id) in enumerate(places, start=1):
        try:
            with suppress(UnknownBatchError), transaction.atomic(using=using):  # it was pruned meanwhile
                repairs += PostgresTransitions(using).repair_batch(name, batch_id, by)
        except DatabaseError as error:
            if not connections[using].is_usable():
                raise
            repairs.append(BatchRepair(batch_id, "error", None, str(error).strip()))
        if progress is not None:
            progress(number, len(places))
    for using in sorted({using for _, using, _ in places}):
        fold_after_commit(using)
    return repairs


def _require_known_commit(using: str, on_complete: object) -> None:
    """A function is called after a commit. Where transactions are managed by hand, Django does not know of any."""
    is_function = on_complete is not None and not isinstance(on_complete, NewCommand)
    if is_function and not transaction.get_autocommit(using) and not connections[using].in_atomic_block:
        raise InvalidCommandError(
            f"on_complete cannot be a function while autocommit is off on database {using!r}, because nobody would "
            f"learn of the commit; give a BatchCommand, or create the batch in transaction.atomic()"
        )


def _open(
    domain: str,
    using: str,
    batch_id: UUID,
    name: str | None,
    custom_data: Mapping[str, Any] | None,
    total: int | None,
    on_complete: BatchCommand | BatchCallback | None,
) -> None:
    if name is not None and (not isinstance(name, str) or not 1 <= len(name) <= 255 or storable(name) != name):
        raise InvalidCommandError(f"the name of a batch must have 1 to 255 characters, not {name!r:.100}")
    command = on_complete if isinstance(on_complete, NewCommand) else None
    if command is not None:
        command = _checked(command, using, "on_complete")
    elif on_complete is not None and not callable(on_complete):
        raise InvalidCommandError(f"on_complete must be a BatchCommand or a function, not {on_complete!r:.100}")
    is_new = PostgresTransitions(using).open_batch(
        domain, batch_id, name=name, custom_data=custom_data, expected_count=total, on_complete=command
    )
    if on_complete is None or isinstance(on_complete, NewCommand):
        return
    if is_new or not require_batch(domain, batch_id).is_complete:
        hook = partial(call_when_complete, using, batch_id, on_complete)
        transaction.on_commit(hook, using=using, robust=True)


def _send_all(domain: str, using: str, batch_id: UUID, commands: Iterable[BatchCommand], *, only_new: bool) -> int:
    remaining = enumerate(commands, start=1)
    sent = 0
    while chunk := list(islice(remaining, CHUNK)):
        verified = [(number, _checked(command, using, f"number {number}")) for number, command in chunk]
        try:
            outcomes = try_send(domain, [command for _, command in verified], batch_id)
            require_sent(domain, outcomes)
        except DuplicateCommandError as error:
            raise _numbered(error, verified) from None
        new = {command_id for command_id, outcome in outcomes.items() if outcome == "SENT"}
        if only_new and len(new) < len(chunk):
            raise _numbered(_repeated(domain, verified, new), verified)
        sent += len(new)
    if not sent and not only_new:
        require_batch(domain, batch_id)  # there was nothing to send, and perhaps no batch
    return sent


def _checked(command: object, using: str, what: str) -> BatchCommand:
    if not isinstance(command, NewCommand):
        raise InvalidCommandError(f"{what} must be a BatchCommand, not {command!r:.100}")
    try:
        return checked(command, using)
    except CommandBusError as error:
        raise type(error)(f"{what}: {error}") from None


def _repeated(domain: str, chunk: list[tuple[int, BatchCommand]], new: set[UUID]) -> DuplicateCommandError:
    times = Counter(command.command_id for _, command in chunk)
    repeated = next(command_id for command_id in times if times[command_id] > 1 or command_id not in new)
    return DuplicateCommandError(
        domain, [repeated], f"command {repeated} is in the batch twice; name each command once"
    )


def _numbered(error: DuplicateCommandError, chunk: list[tuple[int, BatchCommand]]) -> DuplicateCommandError:
    number = max(number for number, command in chunk if command.command_id in error.command_ids[:1])
    return DuplicateCommandError(error.domain, error.command_ids, f"number {number}: {error}")


class _BatchWait(Wait[BatchMetadata, BatchMetadata]):
    def __init__(self, domain: str, batch_id: UUID, timeout: float) -> None:
        super().__init__(timeout)
        self.domain = domain
        self.batch_id = uuid_of(batch_id, "batch_id")
        self._next_fold = 0.0

    def find(self) -> str:
        require_batch(self.domain, self.batch_id)
        return database_of(self.domain)

    def read(self, connection: BaseDatabaseWrapper) -> BatchMetadata | None:
        if not in_transaction(connection) and time.monotonic() >= self._next_fold:
            self._fold(connection)
        with connection.cursor() as cursor:
            cursor.execute("SELECT commandbus.batch_now(%s)", [self.batch_id])
            [(now,)] = cursor.fetchall()
            return None if now is None else BatchMetadata.from_json(json.loads(now))

    def _fold(self, connection: BaseDatabaseWrapper) -> None:
        """If we may: who can only read waits for others to do it."""
        started_at = time.monotonic()
        with suppress(DatabaseError):
            fold_on(connection, most_calls=1)
        self._next_fold = time.monotonic() + 4 * (time.monotonic() - started_at)

    def result(self, state: BatchMetadata) -> BatchMetadata | None:
        return state if state.is_complete else None

    def is_hidden(self, inside: BatchMetadata, outside: BatchMetadata) -> bool:
        return (
            (outside.is_open and not inside.is_open)
            or (outside.canceled_at is None and inside.canceled_at is not None)
            or inside.ended_count > outside.ended_count
        )

    def gone(self) -> Exception:
        return UnknownBatchError(f"batch {self.batch_id} was pruned meanwhile")

    def uncommitted(self, alias: str) -> Exception:
        return UncommittedBatchError(
            f"nobody can see what became of batch {self.batch_id} before the transaction on database {alias!r} "
            f"commits, so it cannot complete; wait for it after the atomic block"
        )

    def late(self, state: BatchMetadata) -> Exception:
        left = f"{state.ended_count} of {state.total_count} commands have ended"
        if state.in_troubleshooting_count:
            left += f", {state.in_troubleshooting_count} wait for an operator"
        if state.is_open:
            left += ", and it is not sealed"
        return BatchTimeoutError(f"batch {self.batch_id} has not completed within {self.timeout} seconds: {left}")


def _unknown(domain: str, batch_id: UUID) -> UnknownBatchError:
    return UnknownBatchError(
        f"there is no batch {batch_id} in domain {domain!r}; it was not created, not committed, or pruned meanwhile"
    )


def _asynchronous(function: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """The same, for coroutines. It commits by itself: Django has no asynchronous transactions to join."""

    @wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return await sync_to_async(function)(*args, **kwargs)

    call.__name__ = call.__qualname__ = f"a{function.__name__}"
    return call


acreate_batch = _asynchronous(create_batch)
aopen_batch = _asynchronous(open_batch)
aadd_to_batch = _asynchronous(add_to_batch)
aseal_batch = _asynchronous(seal_batch)
aget_batch = _asynchronous(get_batch)
alist_batches = _asynchronous(list_batches)
alist_batch_commands = _asynchronous(list_batch_commands)
