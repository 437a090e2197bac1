from __future__ import annotations

from typing import Any

from django.db import models

from example_project.database import REPORTS


class ReportsRouter:
    """The tables of reports live in a database of their own, beside the commands that fill them."""

    def db_for_read(self, model: type[models.Model], **hints: Any) -> str | None:
        return REPORTS if model._meta.app_label == "reports" else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        if app_label == "reports":
            return db == REPORTS
        return None if db != REPORTS else app_label == "commandbus"
