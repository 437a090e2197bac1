"""The Django project of the benchmark. Its database is named in BENCHMARK_URL."""

from __future__ import annotations

import os

from psycopg.conninfo import conninfo_to_dict

_server = conninfo_to_dict(os.environ["BENCHMARK_URL"])

SECRET_KEY = "benchmark"  # noqa: S105 - it serves no page
INSTALLED_APPS = ["commandbus", "benchmarks.bus"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _server["dbname"],
        "USER": _server["user"],
        "HOST": _server["host"],
        "OPTIONS": {"prepare_threshold": 5},  # as docs/performance.md recommends
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
COMMANDBUS = {"NOTIFY": os.environ.get("BENCHMARK_NOTIFY", "after_commit")}
