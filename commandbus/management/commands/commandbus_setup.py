from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import connections

from commandbus import conf, install


class Command(BaseCommand):
    help = "Install the SQL functions, make partitions, and register the domains of the settings and handlers."

    def handle(self, *args: Any, **options: Any) -> None:
        config = conf.current()
        for using in sorted({conf.DEFAULT_ALIAS, *config.databases.values()}):
            if connections[using].vendor != "postgresql":
                continue
            if not install.prepare(using):
                raise CommandError(f"database {using!r} has no tables of commandbus; run: manage.py migrate")
            domains = ", ".join(install.register_domains(using)) or "none"
            self.stdout.write(f"{using}: functions are up to date; domains: {domains}")
