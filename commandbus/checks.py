"""Wrong configuration is found by `manage.py check`."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage, Error

from commandbus import conf, install
from commandbus.exceptions import ConfigurationError


def check_range_filter(**_: Any) -> list[CheckMessage]:
    if not apps.is_installed("django.contrib.admin") or apps.is_installed("rangefilter"):
        return []
    return [
        checks.Warning(
            "the admin's lists of commands cannot be narrowed to a range of dates",
            hint="Add 'rangefilter' to INSTALLED_APPS (it is installed with commandbus)",
            id="commandbus.W001",
        )
    ]


def check_settings(**_: Any) -> list[CheckMessage]:
    problems: list[CheckMessage] = [
        Error(problem, hint="docs/reference.md lists the settings", id="commandbus.E001") for problem in conf.problems()
    ]
    if problems:
        return problems
    config = conf.current()
    try:
        aliases = {*install.databases(), *config.listen_databases.values()}
    except ConfigurationError as error:
        return [Error(str(error), id="commandbus.E001")]
    for alias in sorted(aliases):
        database: dict[str, Any] = settings.DATABASES.get(alias, {})
        engine = database.get("ENGINE", "")
        if "postg" not in engine:
            problems.append(
                Error(
                    f"database {alias!r} has the engine {engine!r}, and commandbus needs PostgreSQL",
                    hint="Set COMMANDBUS['DATABASES'] for every domain, or use django.db.backends.postgresql",
                    id="commandbus.E002",
                )
            )
        level = database.get("OPTIONS", {}).get("isolation_level")
        if level is not None and str(getattr(level, "name", level)) not in ("READ_COMMITTED", "2"):
            problems.append(
                Error(
                    f"database {alias!r} has the isolation level {level!r}, and commandbus needs READ COMMITTED",
                    hint="Remove isolation_level from its OPTIONS, or give the bus a database alias of its own",
                    id="commandbus.E003",
                )
            )
    return problems
