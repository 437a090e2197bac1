"""PGMQ as an extension, packed as docker/Dockerfile packs it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from pgmq.install import get_embedded_install_sql, get_embedded_sql_version

from commandbus.embedded import EmbeddedPostgres
from tests.helpers import environment
from tests.settings import VERSION

pytestmark = pytest.mark.integration
CONTROL = Path(__file__).resolve().parents[2] / "docker" / "pgmq.control"


class WithExtension(EmbeddedPostgres):
    """The embedded PostgreSQL, copied, with PGMQ among its extensions."""

    def binaries(self) -> Path:
        original = super().binaries()
        copy = self.home / "install"
        binaries = copy / original.parents[1].name / original.parent.name / "bin"
        if not copy.exists():
            shutil.copytree(original.parent, binaries.parent, symlinks=True)
            libraries = original.parents[1].with_name(f"{original.parents[1].name}.libs")
            shutil.copytree(libraries, copy / libraries.name, symlinks=True)
            folder = next(binaries.parent.glob("share/**/extension"))
            (folder / "pgmq.control").write_text(CONTROL.read_text())
            (folder / f"pgmq--{get_embedded_sql_version()}.sql").write_text(get_embedded_install_sql())
        return binaries


def test_the_extension_is_created_where_it_is_available(home: Path) -> None:
    with WithExtension(home, version=VERSION) as server:
        server.create_database("extended")
        place = {"COMMANDBUS_TEST_HOST": str(server.data), "COMMANDBUS_TEST_DATABASE": "extended"}
        for words in (["migrate", "-v0"], ["commandbus_worker", "orders", "--until-empty"]):
            if words[0] == "commandbus_worker":
                with psycopg.connect(server.url("extended")) as connection:
                    connection.execute(
                        "SELECT commandbus.send("
                        "'orders', ARRAY[gen_random_uuid()], ARRAY['SendMail'], ARRAY['{}'::jsonb])"
                    )
            subprocess.run([sys.executable, "-m", "django", *words], env=environment(**place), check=True)
        with psycopg.connect(server.url("extended")) as connection:
            version = connection.execute("SELECT extversion FROM pg_extension WHERE extname = 'pgmq'").fetchone()
            status = connection.execute("SELECT status FROM command_bus_command").fetchone()
    assert version == (get_embedded_sql_version(),)
    assert status == ("COMPLETED",)
