from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from example_project.database import databases
from tests.helpers import unmeasured
from tests.settings import TEST_SERVER

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def demo_environment(postgres: None) -> Iterator[dict[str, str]]:
    """The demo on a database of its own, by DATABASE_URL."""
    name = f"demo_{uuid4().hex}"
    TEST_SERVER.create_database(name)
    url = TEST_SERVER.url(name)
    yield {**unmeasured(os.environ), "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "example_project.settings"}
    with psycopg.connect(TEST_SERVER.url("postgres"), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_the_demo_adds_up(demo_environment: dict[str, str]) -> None:
    for _ in range(2):  # also on a database that has a history
        done = subprocess.run(
            [sys.executable, "manage.py", "demo", "--once"],
            cwd=ROOT,
            env=demo_environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "It adds up." in done.stdout
        assert "Spark has sent 200 commands from a CSV file" in done.stdout
        assert "user: admin" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_demo_leaves_nothing_running(demo_environment: dict[str, str], number: signal.Signals) -> None:
    demo = subprocess.Popen(
        [sys.executable, "manage.py", "demo"],
        cwd=ROOT,
        env=demo_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith("sent "):
            break
    children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
    assert len(children) == 3
    demo.send_signal(number)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 0, output
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_database_url_becomes_djangos_settings() -> None:
    url = "postgresql://me:secret@db.example:6432/shop?sslmode=require"
    shop = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "shop",
        "USER": "me",
        "PASSWORD": "secret",
        "HOST": "db.example",
        "PORT": "6432",
        "OPTIONS": {"sslmode": "require"},
    }
    assert databases({"DATABASE_URL": url}) == {"default": shop}
    assert databases({"DATABASE_URL": url, "REPORTS_DATABASE_URL": url}) == {"default": shop, "reports": shop}
    assert databases({})["default"]["NAME"].startswith("commandbus_")
    assert databases({})["reports"]["NAME"].endswith("_reports")


def test_a_wrong_database_url_is_refused_without_repeating_its_password() -> None:
    with pytest.raises(SystemExit) as caught:
        databases({"DATABASE_URL": "postgresql://me:secret@[host/x"})
    assert "secret" not in str(caught.value)
