"""A small real project: payments and reports."""

from __future__ import annotations

import os

from example_project.database import REPORTS, databases

SECRET_KEY = os.environ.get("SECRET_KEY", "only-for-the-demo-on-this-machine")
DEBUG = True
ALLOWED_HOSTS = ["localhost", "127.0.0.1"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rangefilter",
    "commandbus",
    "example_project.payments",
    "example_project.reports",
    "example_project",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
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
DATABASES = databases()
DATABASE_ROUTERS = ["example_project.routers.ReportsRouter"] if REPORTS in DATABASES else []
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
STATIC_URL = "static/"
TIME_ZONE = "UTC"
USE_TZ = True

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {"commandbus": {"handlers": ["console"], "level": os.environ.get("LOG_LEVEL", "INFO")}},
}

COMMANDBUS = {
    "DATABASES": {"reports": REPORTS} if REPORTS in DATABASES else {},
    "RETRY_POLICY": {"max_attempts": 3, "backoff": (10, 60, 300), "jitter": 0.1},
}
