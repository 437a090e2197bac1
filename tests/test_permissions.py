from __future__ import annotations

import subprocess
import sys
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from django.apps import apps
from django.apps.registry import Apps
from django.contrib.auth.models import Group, Permission
from django.core import checks
from django.core.management import call_command
from django.test import override_settings
from psycopg import sql

from commandbus.checks import check_range_filter
from commandbus.permissions import OPERATORS, VIEWERS, create_groups
from tests.helpers import environment
from tests.settings import TEST_SERVER

ACTIONS = {"retry_command", "cancel_command", "complete_command", "edit_command_payload", "pause_domain", "stop_node"}
ACTIONS |= {"cancel_batch", "retry_batch", "seal_batch"}
APP = apps.get_app_config("commandbus")


def permissions(group: str) -> set[str]:
    return set(Group.objects.get(name=group).permissions.values_list("codename", flat=True))


@pytest.mark.django_db
def test_two_groups_are_there_after_migrate() -> None:
    names = ("audit", "batch", "command", "domain", "node", "sparkjob", "unreadablemessage")
    views = {f"view_{name}" for name in names}
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


def test_without_djangos_users_there_are_no_groups() -> None:
    create_groups(APP, "default", Apps())  # and asks no database


def test_commandbus_may_be_migrated_before_djangos_users(postgres: None) -> None:
    """Its groups are made as soon as both are there, whichever comes last."""
    database = f"alone_{uuid4().hex}"
    TEST_SERVER.create_database(database)
    here = environment(COMMANDBUS_TEST_DATABASE=database)
    for words in (["migrate", "commandbus", "-v0"], ["migrate", "-v0"]):
        subprocess.run([sys.executable, "-m", "django", *words], env=here, check=True)
    with psycopg.connect(TEST_SERVER.url(database)) as connection:
        groups = connection.execute("SELECT name FROM auth_group ORDER BY name").fetchall()
    with psycopg.connect(TEST_SERVER.url("postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {}").format(sql.Identifier(database)))
    assert groups == [(OPERATORS,), (VIEWERS,)]


def test_a_check_warns_where_rangefilter_is_missing(settings: Any) -> None:
    assert check_range_filter() == []
    without = [app for app in settings.INSTALLED_APPS if app != "rangefilter"]
    with override_settings(INSTALLED_APPS=without):
        [warning] = check_range_filter()
        assert isinstance(warning, checks.Warning)
        assert "rangefilter" in (warning.hint or "")
    with override_settings(INSTALLED_APPS=[app for app in without if app != "django.contrib.admin"]):
        assert check_range_filter() == []
