from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from commandbus import install


class Command(BaseCommand):
    help = "Install the SQL functions, make partitions, and register the domains of the settings and handlers."

    def handle(self, *args: Any, **options: Any) -> None:
        for using in install.databases():
            if not install.prepare(using):
                raise CommandError(
                    f"database {using!r} has no tables of commandbus; run: manage.py migrate --database {using}"
                )
            domains = ", ".join(install.register_domains(using)) or "none"
            self.stdout.write(f"{using}: functions are up to date; domains: {domains}")
