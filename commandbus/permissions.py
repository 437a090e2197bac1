"""Who may look and who may act: two groups to start with. They are yours to change once they are there."""

from __future__ import annotations

from django.apps import AppConfig, apps
from django.db import router

OPERATORS = "commandbus operators"
VIEWERS = "commandbus viewers"


def create_groups(app: AppConfig, using: str) -> None:
    """Make the groups that are missing, in the database that has Django's. A group that is there is left as it is."""
    if not apps.is_installed("django.contrib.auth"):
        return
    from django.contrib.auth.management import create_permissions
    from django.contrib.auth.models import Group, Permission

    if not router.allow_migrate_model(using, Group):
        return
    groups = Group.objects.using(using)
    missing = {OPERATORS, VIEWERS} - set(groups.filter(name__in=[OPERATORS, VIEWERS]).values_list("name", flat=True))
    if not missing:
        return
    create_permissions(app, using=using, verbosity=0)  # auth may come after us
    permissions = Permission.objects.using(using).filter(content_type__app_label=app.label)
    for name in sorted(missing):
        group, _ = groups.get_or_create(name=name)
        group.permissions.set(permissions if name == OPERATORS else permissions.filter(codename__startswith="view_"))
