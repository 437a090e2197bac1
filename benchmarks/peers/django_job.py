"""The task of django_tasks_db, imported when Django is set up."""

from __future__ import annotations

from django_tasks import task

from benchmarks.peers.job import counter


@task()
def noop(n: int, account: str, amount: int) -> None:
    counter.handled()
