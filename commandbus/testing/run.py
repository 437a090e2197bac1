from __future__ import annotations

from commandbus.handlers import HandlerRegistry, registry
from commandbus.transitions import Transitions
from commandbus.worker.execute import Executor, apply
from commandbus.worker.work import Work

VT = 30


def run_pending(
    transitions: Transitions,
    domain: str,
    *,
    using: str | None = None,
    handlers: HandlerRegistry = registry,
    limit: int = 1000,
) -> int:
    """Run what is ready now, in this thread and on this connection, and answer how many deliveries that were.

    Commands that these commands send are run too; those that wait for a retry or a delay are not.
    """
    executor = Executor(transitions, using)
    ran = 0
    while ran < limit and (received := transitions.receive(domain, qty=1, vt=VT)):
        for one in received:
            handler = handlers.of(one.command)
            apply(transitions, domain, executor.execute(Work(domain, handler, (one,))), grace=0)
            ran += 1
    return ran
