"""The project that the tests run in. Starts nothing: the server is started by tests/conftest.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

from commandbus.embedded import SUPERUSER, EmbeddedPostgres, home_for

VERSION = int(os.environ.get("COMMANDBUS_TEST_POSTGRES", "18"))
TEST_SERVER = EmbeddedPostgres(
    home_for(Path(__file__).parent / str(VERSION)), version=VERSION, settings={"fsync": "off"}
)

SECRET_KEY = "tests"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rangefilter",
    "commandbus",
    "tests.shop",
    "example_project.payments",
    "example_project.reports",
]
MIDDLEWARE = [
    "tests.csp.StrictPolicy",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
ROOT_URLCONF = "example_project.urls"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
SERVER = {
    "ENGINE": "django.db.backends.postgresql",
    "USER": SUPERUSER,
    "HOST": os.environ.get("COMMANDBUS_TEST_HOST", str(TEST_SERVER.data)),
}
DATABASES = {
    "default": {
        **SERVER,
        "NAME": os.environ.get("COMMANDBUS_TEST_DATABASE", "postgres"),
        "TEST": {"NAME": "test_commandbus"},
    },
    "second": {
        **SERVER,
        "NAME": os.environ.get("COMMANDBUS_TEST_SECOND_DATABASE", "postgres"),
        "TEST": {"NAME": "test_commandbus_second"},
    },
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TIME_ZONE = "UTC"
USE_TZ = True
COMMANDBUS = {
    "DOMAINS": ["orders", "other", "sales"],
    "DATABASES": {"archive": "second"},
    **json.loads(os.environ.get("COMMANDBUS_TEST_SETTINGS", "{}")),
}
STATIC_URL = "static/"
