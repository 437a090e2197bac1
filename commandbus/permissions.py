"""Who may look and who may act: two groups to start with. They are yours to change once they are there."""

from __future__ import annotations

from django.apps import AppConfig, apps
from django.apps.registry import Apps
from django.db import router

OPERATORS = "commandbus operators"
VIEWERS = "commandbus viewers"


def create_groups(app: AppConfig, using: str, apps: Apps = apps) -> None:
    """Make the groups that are missing, in the database that has Django's. A group that is there is left as it is.

    `apps`: what is migrated in this database.
    """
    try:
        group_model, permission_model = apps.get_model("auth", "Group"), apps.get_model("auth", "Permission")
        apps.get_model("contenttypes", "ContentType")
    except LookupError:
        return
    from django.contrib.auth.management import create_permissions

    if not router.allow_migrate_model(using, group_model):
        return
    groups = group_model.objects.using(using)
    missing = {OPERATORS, VIEWERS} - set(groups.filter(name__in=[OPERATORS, VIEWERS]).values_list("name", flat=True))
    if not missing:
        return
    create_permissions(app, using=using, apps=apps, verbosity=0)  # auth may come after us
    permissions = permission_model.objects.using(using).filter(content_type__app_label=app.label)
    for name in sorted(missing):
        group, _ = groups.get_or_create(name=name)
        group.permissions.set(permissions if name == OPERATORS else permissions.filter(codename__startswith="view_"))
