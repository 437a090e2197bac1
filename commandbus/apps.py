from __future__ import annotations

from typing import Any

from django.apps import AppConfig, apps
from django.apps.registry import Apps
from django.core import checks
from django.db.models.signals import post_migrate

from commandbus import conf, handlers


class CommandBusConfig(AppConfig):
    name = "commandbus"
    verbose_name = "Command bus"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from commandbus.checks import check_range_filter, check_settings

        checks.register(check_settings, checks.Tags.compatibility)
        checks.register(check_range_filter, checks.Tags.admin)
        post_migrate.connect(_prepare_database, sender=self, dispatch_uid="commandbus.prepare")
        if not conf.problems():  # the check names them; commands that run checks must still start
            handlers.discover(apps.get_app_configs(), conf.current().handlers_module)


def _prepare_database(*, app_config: AppConfig, using: str, apps: Apps = apps, **_: Any) -> None:
    from commandbus.install import prepare
    from commandbus.permissions import create_groups

    prepare(using)
    create_groups(app_config, using, apps)
