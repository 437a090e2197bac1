from __future__ import annotations

from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.models import Group, Permission
from django.core import checks
from django.core.management import call_command
from django.test import override_settings

from commandbus.checks import check_range_filter
from commandbus.permissions import OPERATORS, VIEWERS, create_groups

ACTIONS = {"retry_command", "cancel_command", "complete_command", "edit_command_payload", "pause_domain", "stop_node"}
APP = apps.get_app_config("commandbus")


def permissions(group: str) -> set[str]:
    return set(Group.objects.get(name=group).permissions.values_list("codename", flat=True))


@pytest.mark.django_db
def test_two_groups_are_there_after_migrate() -> None:
    views = {"view_audit", "view_command", "view_domain", "view_node", "view_unreadablemessage"}
    assert permissions(VIEWERS) == views
    assert permissions(OPERATORS) == views | ACTIONS


@pytest.mark.django_db
def test_a_group_that_was_changed_is_left_alone_and_one_that_is_gone_comes_back() -> None:
    Group.objects.get(name=OPERATORS).permissions.remove(Permission.objects.get(codename="stop_node"))
    Group.objects.get(name=VIEWERS).delete()
    call_command("migrate", verbosity=0)
    assert permissions(OPERATORS) >= ACTIONS - {"stop_node"}
    assert "stop_node" not in permissions(OPERATORS)
    assert permissions(VIEWERS)


@pytest.mark.django_db
def test_permissions_are_made_also_before_django_makes_them() -> None:
    Group.objects.all().delete()
    Permission.objects.filter(content_type__app_label="commandbus").delete()
    create_groups(APP, "default")
    assert permissions(OPERATORS) >= ACTIONS


def test_without_djangos_users_there_are_no_groups(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps, "is_installed", lambda name: name != "django.contrib.auth")
    create_groups(APP, "default")  # and asks no database


def test_a_check_warns_where_rangefilter_is_missing(settings: Any) -> None:
    assert check_range_filter() == []
    without = [app for app in settings.INSTALLED_APPS if app != "rangefilter"]
    with override_settings(INSTALLED_APPS=without):
        [warning] = check_range_filter()
        assert isinstance(warning, checks.Warning)
        assert "rangefilter" in (warning.hint or "")
    with override_settings(INSTALLED_APPS=[app for app in without if app != "django.contrib.admin"]):
        assert check_range_filter() == []
