"""Where example_project keeps its data: DATABASE_URL, or an embedded PostgreSQL that belongs to this checkout."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from commandbus.embedded import SUPERUSER, EmbeddedPostgres, EmbeddedPostgresError, home_for

CHECKOUT = Path(__file__).resolve().parent.parent
APPS = ("commandbus", "example_project/payments", "example_project/reports")
REPORTS = "reports"
"""The alias of the second database, and the domain that lives there."""


def _database_name() -> str:
    """Until the first release migrations may be rewritten. A database made by others of them is left alone."""
    migrations = sorted(path for app in APPS for path in (CHECKOUT / app / "migrations").glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in migrations))
    return f"commandbus_{digest.hexdigest()[:8]}"


DATABASE = _database_name()
WITHOUT_DATABASE = {"help", "version", "--help", "-h", "--version", "remove_embedded"}

_server: EmbeddedPostgres | None = None


def databases(environ: Mapping[str, str] = os.environ) -> dict[str, dict[str, Any]]:
    """Django's DATABASES. Starts nothing: importing settings must have no effect.

    The second one shows that a domain can have its own. Beside DATABASE_URL it needs REPORTS_DATABASE_URL.
    """
    if not environ.get("DATABASE_URL"):
        return {"default": _embedded(DATABASE), REPORTS: _embedded(f"{DATABASE}_{REPORTS}")}
    found = {"default": _by_url(environ, "DATABASE_URL")}
    if environ.get("REPORTS_DATABASE_URL"):
        found[REPORTS] = _by_url(environ, "REPORTS_DATABASE_URL")
    return found


def _embedded(name: str) -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "USER": SUPERUSER,
        "HOST": str(EmbeddedPostgres(home_for(CHECKOUT)).data),
    }


def _by_url(environ: Mapping[str, str], variable: str) -> dict[str, Any]:
    try:
        parts = conninfo_to_dict(environ[variable])
    except Exception:  # noqa: BLE001 - libpq repeats the URL, which may hold a password, in its error
        raise SystemExit(f"{variable} is not a PostgreSQL address like postgresql://user:password@host/name") from None
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    settings: dict[str, Any] = {"ENGINE": "django.db.backends.postgresql", "OPTIONS": {}}
    for key, value in parts.items():
        if key in names:
            settings[names[key]] = value
        else:
            settings["OPTIONS"][key] = value
    return settings


def provide_database(argv: list[str]) -> None:
    """Start the embedded PostgreSQL for this process, unless DATABASE_URL names another one."""
    global _server
    if os.environ.get("DATABASE_URL") or _server is not None or WITHOUT_DATABASE & set(argv[1:2]):
        return
    _server = EmbeddedPostgres(home_for(CHECKOUT))
    try:
        _server.start()
    except EmbeddedPostgresError as error:
        sys.exit(str(error))
    for settings in databases({}).values():
        _server.create_database(settings["NAME"])
