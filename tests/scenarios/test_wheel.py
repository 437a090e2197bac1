"""The wheel in an empty Django project: nothing of this checkout is on its path."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from tests.settings import TEST_SERVER

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def empty_project(tmp_path: Path, postgres: None) -> Path:
    run(tmp_path, sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path / "dist"), str(ROOT))
    [wheel] = (tmp_path / "dist").glob("*.whl")
    run(tmp_path, sys.executable, "-m", "venv", str(tmp_path / "venv"))
    run(tmp_path, "venv/bin/pip", "install", "--quiet", "--disable-pip-version-check", str(wheel))
    run(tmp_path, "venv/bin/django-admin", "startproject", "empty", ".")
    return tmp_path


def run(folder: Path, *words: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DJANGO", "COV", "PYTHON"))}
    done = subprocess.run(words, cwd=folder, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_migrates_sends_and_works_a_command(empty_project: Path) -> None:
    database = f"wheel_{uuid4().hex}"
    TEST_SERVER.create_database(database)
    settings = empty_project / "empty" / "settings.py"
    settings.write_text(
        settings.read_text()
        + textwrap.dedent(f"""
            INSTALLED_APPS += ["commandbus", "rangefilter"]
            DATABASES = {{"default": {{
                "ENGINE": "django.db.backends.postgresql", "NAME": {database!r}, "USER": "postgres",
                "HOST": {str(TEST_SERVER.data)!r},
            }}}}
        """)
    )
    (empty_project / "greetings").mkdir()
    (empty_project / "greetings" / "__init__.py").touch()
    (empty_project / "greetings" / "handlers.py").write_text(
        textwrap.dedent("""
            from commandbus import command_handler

            @command_handler("greetings", "Greet")
            def greet(command, context):
                return {"text": f"Hello {command.data['name']}"}
        """)
    )
    settings.write_text(settings.read_text() + 'INSTALLED_APPS += ["greetings"]\n')
    python = "venv/bin/python"
    run(empty_project, python, "manage.py", "check", "--fail-level", "WARNING")
    run(empty_project, python, "manage.py", "migrate", "-v0")
    run(empty_project, python, "manage.py", "makemigrations", "--check", "--dry-run")
    send = "import uuid, commandbus; commandbus.send_command('greetings', 'Greet', uuid.uuid4(), {'name': 'you'})"
    run(empty_project, python, "manage.py", "shell", "-c", send)
    run(empty_project, python, "manage.py", "commandbus_worker", "greetings", "--until-empty")
    with psycopg.connect(TEST_SERVER.url(database)) as connection:
        row = connection.execute("SELECT status, answer->'data' FROM command_bus_command").fetchone()
    assert row == ("COMPLETED", {"text": "Hello you"})
    with psycopg.connect(TEST_SERVER.url("postgres"), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {database} WITH (FORCE)")
