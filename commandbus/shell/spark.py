"""Spark's jobs with the databases of a Django project."""

from __future__ import annotations

import psycopg
from django.db import connections
from psycopg.conninfo import make_conninfo

from commandbus.api import database_for_sending

LIBPQ = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}


def url_of(domain: str) -> str:
    """Where the database of a domain is, as libpq is told. Raises UnknownDomainError."""
    using = database_for_sending(domain)
    parameters = connections[using].get_connection_params()
    return make_conninfo(**{name: value for name, value in parameters.items() if name in LIBPQ and value is not None})
