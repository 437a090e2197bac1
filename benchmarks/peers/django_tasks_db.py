"""django-tasks-db: Django's tasks, kept in the database. It has no bulk interface; many are sent in one transaction."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

import django
from django.conf import settings
from django.core.management import call_command
from django.db import transaction

from benchmarks.peers.job import chunks, payload
from benchmarks.peers.processes import in_processes
from benchmarks.side import Side, main

# Jobs per second by processes: 2 610; 3 680; 4 630; 6 580; 8 480. Server-side binding changes nothing.
CHUNK = 1000
PROCESSES = 3
INTERVAL = 0.1  # it polls; the default is a second


class DjangoTasksDb(Side):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        parts = urlsplit(url)
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts.path.lstrip("/"),
            "USER": parts.username,
            "HOST": parts.hostname or parse_qs(parts.query)["host"][0],
            "CONN_MAX_AGE": None,  # else it connects anew for every task
        }
        settings.configure(
            DATABASES={"default": database},
            INSTALLED_APPS=["django_tasks", "django_tasks_db"],
            TASKS={"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}},
            USE_TZ=True,
        )
        django.setup()

    def prepare(self) -> None:
        call_command("migrate", verbosity=0)

    def fill(self, count: int) -> None:
        from benchmarks.peers.django_job import noop

        for numbers in chunks(count, CHUNK):
            with transaction.atomic():
                for number in numbers:
                    noop.enqueue(**payload(number))

    def sender(self) -> Callable[[], None]:
        from benchmarks.peers.django_job import noop

        def send() -> None:
            noop.enqueue(**payload(1))

        return send

    def work(self) -> None:

        def run() -> None:
            call_command("db_worker", interval=INTERVAL, startup_delay=False, verbosity=0)

        in_processes(PROCESSES, run)

    def remaining(self) -> int:
        from django_tasks_db.models import DBTaskResult

        return int(DBTaskResult.objects.filter(status__in=["READY", "RUNNING"]).count())


if __name__ == "__main__":
    main(DjangoTasksDb)
