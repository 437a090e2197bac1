from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from commandbus.embedded import EmbeddedPostgresError, home_for, remove
from example_project.database import CHECKOUT


class Command(BaseCommand):
    help = "Delete this checkout's embedded databases (the project's and the tests')."
    requires_system_checks = ()

    def handle(self, *args: Any, **options: Any) -> None:
        for folder in (CHECKOUT, CHECKOUT / "tests" / "16", CHECKOUT / "tests" / "18"):
            try:
                remove(home_for(folder))
            except EmbeddedPostgresError as error:
                raise CommandError(str(error)) from None
