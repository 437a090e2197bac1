from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

from django.db import connection, connections
from django.db.backends.utils import CursorWrapper

from commandbus import BatchCommand, BatchMetadata, create_batch, get_batch
from commandbus.folding import fold_on
from commandbus.messages import ErrorInfo, Failure, Finish, ReceivedCommand, Status
from commandbus.models import Audit, Batch, BatchDelta, Command
from commandbus.transitions import PostgresTransitions
from tests.helpers import WAITING_SESSIONS

BUS = PostgresTransitions("default")
ERROR = ErrorInfo("SomeError", "BAD", "it did not work")


def some(count: int = 1, command_type: str = "PlaceOrder", **data: Any) -> list[BatchCommand]:
    return [BatchCommand(command_type, uuid4(), data) for _ in range(count)]


def make(count: int = 1, domain: str = "orders", **options: Any) -> UUID:
    return create_batch(domain, some(count), **options)


def batch(batch_id: UUID, domain: str = "orders") -> BatchMetadata:
    found = get_batch(domain, batch_id)
    assert found is not None
    return found


def fold_batches(using: str = "default") -> int:
    """Also in the transaction of a test that is rolled back."""
    return fold_on(connections[using])


def folded(batch_id: UUID) -> BatchMetadata:
    fold_batches("default")
    return batch(batch_id)


def counts(batch_id: UUID) -> tuple[int, int, int, int, int]:
    """total, completed, failed, canceled, in troubleshooting"""
    now = batch(batch_id)
    return (
        now.total_count,
        now.completed_count,
        now.failed_count,
        now.canceled_count,
        now.in_troubleshooting_count,
    )


def recount(batch_id: UUID) -> tuple[int, int, int, int, int]:
    statuses = list(Command.objects.filter(batch_id=batch_id).values_list("status", flat=True))
    return (
        len(statuses),
        statuses.count(Status.COMPLETED),
        statuses.count(Status.FAILED),
        statuses.count(Status.CANCELED),
        statuses.count(Status.IN_TROUBLESHOOTING_QUEUE),
    )


def receive(qty: int = 100, domain: str = "orders", vt: int = 30) -> list[ReceivedCommand]:
    return BUS.receive(domain, qty=qty, vt=vt)


def finish(received: Iterable[ReceivedCommand], status: Status = Status.COMPLETED, domain: str = "orders") -> set[UUID]:
    error = None if status is Status.COMPLETED else ERROR
    return BUS.finish(domain, [Finish(one.lease, status, error=error) for one in received])


def fail(received: Iterable[ReceivedCommand], delay: float | None = None) -> dict[UUID, Status]:
    return BUS.fail("orders", [Failure(one.lease, ERROR, delay) for one in received])


def events(batch_id: UUID) -> list[str]:
    """Of the batch itself."""
    found = Audit.objects.filter(batch_id=batch_id, command_id=None).order_by("audit_id")
    return list(found.values_list("event_type", flat=True))


def nothing_is_left() -> bool:
    return not Batch.objects.exists() and not BatchDelta.objects.exists() and not Command.objects.exists()


@contextmanager
def in_another_session() -> Iterator[CursorWrapper]:
    """In a transaction that is rolled back, unless it is committed there."""
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("BEGIN")
            yield cursor
            cursor.execute("ROLLBACK")
    finally:
        other.close()


def somebody_waits() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(WAITING_SESSIONS)
        return bool(cursor.fetchone()[0])


def on_complete(**data: Any) -> BatchCommand:
    return BatchCommand("SendMail", uuid4(), data)
