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


def _database_name() -> str:
    """Until the first release migrations may be rewritten. A database made by others of them is left alone."""
    migrations = sorted((CHECKOUT / "commandbus" / "migrations").glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in migrations))
    return f"commandbus_{digest.hexdigest()[:8]}"


DATABASE = _database_name()
WITHOUT_DATABASE = {"help", "version", "--help", "-h", "--version", "remove_embedded"}

_server: EmbeddedPostgres | None = None


def database_settings(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Django's settings for the database. Starts nothing: importing settings must have no effect."""
    url = environ.get("DATABASE_URL")
    if not url:
        home = home_for(CHECKOUT)
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": DATABASE,
            "USER": SUPERUSER,
            "HOST": str(EmbeddedPostgres(home).data),
        }
    try:
        parts = conninfo_to_dict(url)
    except Exception:  # noqa: BLE001 - libpq repeats the URL, which may hold a password, in its error
        raise SystemExit("DATABASE_URL is not a PostgreSQL address like postgresql://user:password@host/name") from None
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
    _server.create_database(DATABASE)
