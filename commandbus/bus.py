"""The bus as one object, for those who like to hold it. A thin face of the same functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from commandbus import api, batches, conf
from commandbus.callbacks import BatchCallback
from commandbus.encoding import json_object
from commandbus.exceptions import LeaseLostError
from commandbus.handlers import Handler, HandlerFunction, registry
from commandbus.messages import BatchCommand, BatchMetadata, BatchStatus, Data, Finish, ReceivedCommand, Status
from commandbus.models import Command
from commandbus.policies import RetryPolicy
from commandbus.transitions import PostgresTransitions, Transitions
from commandbus.worker.options import WorkerOptions
from commandbus.worker.worker import Worker


class CommandBus:
    def __init__(self) -> None:
        self._workers: list[Worker] = []

    def send(
        self,
        domain: str,
        command_type: str,
        command_id: UUID,
        data: Data,
        reply_to: str | None = None,
        correlation_id: UUID | None = None,
        delay: float | timedelta | None = None,
        *,
        outside_transaction: bool = False,
    ) -> UUID:
        return api.send_command(
            domain,
            command_type,
            command_id,
            data,
            reply_to=reply_to,
            correlation_id=correlation_id,
            delay=delay,
            outside_transaction=outside_transaction,
        )

    def create_batch(
        self,
        domain: str,
        commands: Iterable[BatchCommand],
        *,
        name: str | None = None,
        custom_data: Mapping[str, Any] | None = None,
        on_complete: BatchCommand | BatchCallback | None = None,
    ) -> UUID:
        return batches.create_batch(domain, commands, name=name, custom_data=custom_data, on_complete=on_complete)

    def get_batch(self, domain: str, batch_id: UUID) -> BatchMetadata | None:
        return batches.get_batch(domain, batch_id)

    def list_batches(
        self, domain: str, *, status: BatchStatus | str | None = None, limit: int = 100, offset: int = 0
    ) -> list[BatchMetadata]:
        return batches.list_batches(domain, status=status, limit=limit, offset=offset)

    def list_batch_commands(
        self, domain: str, batch_id: UUID, *, status: Status | str | None = None, limit: int = 100, offset: int = 0
    ) -> list[Command]:
        return batches.list_batch_commands(domain, batch_id, status=status, limit=limit, offset=offset)

    def register_handler(
        self, domain: str, command_type: str, handler_fn: HandlerFunction, retry_policy: RetryPolicy | None = None
    ) -> None:
        registry.register(Handler(domain, command_type, handler_fn, retry_policy))

    def run_worker(self, domain: str, *, concurrency: int = 10, vt_seconds: int = 30, use_notify: bool = True) -> None:
        """Work until `stop()` is called from another thread."""
        worker = Worker(WorkerOptions(domains=(domain,), concurrency=concurrency, vt=vt_seconds, use_notify=use_notify))
        self._workers.append(worker)
        try:
            worker.run()
        finally:
            self._workers.remove(worker)

    def stop(self) -> None:
        for worker in list(self._workers):
            worker.stop()

    def receive(self, domain: str, *, vt_seconds: int = 30, qty: int = 1) -> list[ReceivedCommand]:
        """Lease commands by hand. Whoever receives must complete or cancel before the lease ends."""
        return self._transitions(domain).receive(domain, qty=qty, vt=vt_seconds)

    def complete(self, received: ReceivedCommand, result: Mapping[str, Any] | None = None) -> None:
        if result is not None:
            json_object(result, "result")
        self._end(received, Finish(received.lease, Status.COMPLETED, result))

    def cancel(self, received: ReceivedCommand) -> None:
        self._end(received, Finish(received.lease, Status.CANCELED))

    def _end(self, received: ReceivedCommand, finish: Finish) -> None:
        domain = received.command.domain
        if not self._transitions(domain).finish(domain, [finish]):
            raise LeaseLostError(f"the lease of command {received.command.command_id} ran out; it was not ended")

    def _transitions(self, domain: str) -> Transitions:
        return PostgresTransitions(conf.current().database_of(domain))
