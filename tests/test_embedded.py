from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import psycopg
import pytest

from commandbus import embedded
from commandbus.embedded import EmbeddedPostgres, EmbeddedPostgresError, home_for, remove
from tests.helpers import wait_until

pytestmark = pytest.mark.integration


def test_it_starts_serves_and_stops_when_the_last_user_has_gone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = EmbeddedPostgres(home), EmbeddedPostgres(home)
    first.start()
    second.start()
    first.create_database("once")
    first.create_database("once")
    first.release()
    with psycopg.connect(second.url("once")) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    with monkeypatch.context() as patch:
        patch.setattr(embedded, "STOP_SECONDS", 0)
        with pytest.raises(EmbeddedPostgresError, match="is in use"):
            remove(home)
    second.release()
    wait_until(lambda: not (home / "data" / "postmaster.pid").exists())
    second.start()  # and again
    second.release()


def test_it_stops_when_its_only_user_is_killed(home: Path) -> None:
    script = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from commandbus.embedded import EmbeddedPostgres
        EmbeddedPostgres(Path({str(home)!r})).start()
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    wait_until(lambda: not (home / "data" / "postmaster.pid").exists())


def test_many_can_make_its_folder_at_once(home: Path) -> None:
    """As the processes of a parallel test run do, on a machine that has none yet."""
    together = Barrier(4)

    def make(folder: Path) -> None:
        together.wait(10)
        EmbeddedPostgres(folder)._make_home()

    with ThreadPoolExecutor(4) as threads:
        for number in range(50):
            list(threads.map(make, [home / str(number) / "home"] * 4))
            assert [found.name for found in (home / str(number)).iterdir()] == ["home"]
    assert len(list(home.iterdir())) == 50


def test_its_folder_is_never_replaced_by_that_of_another_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = home / "base"
    rename = Path.rename
    first: list[int] = []

    def second(folder: Path, target: Path) -> Path:
        """Another process is a moment earlier, and has not gone on yet."""
        rename(Path(shutil.copytree(folder, home / "of another process")), target)
        first.append(base.stat().st_ino)
        return rename(folder, target)

    monkeypatch.setattr(Path, "rename", second)
    EmbeddedPostgres(base / "home")._make_home()
    assert first == [base.stat().st_ino]
    assert [found.name for found in home.iterdir()] == ["base"]


def test_it_can_be_restarted(home: Path) -> None:
    with EmbeddedPostgres(home) as server:
        with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 1 AS n")
        server.restart("immediate")
        with psycopg.connect(server.url("postgres")) as connection:
            assert connection.execute("SELECT n FROM kept").fetchone() == (1,)


def test_two_checkouts_have_two_homes(tmp_path: Path) -> None:
    assert home_for(tmp_path / "a") != home_for(tmp_path / "b")
    assert home_for(tmp_path / "a") == home_for(tmp_path / "b" / ".." / "a")


def test_a_version_that_is_not_there_is_named(home: Path) -> None:
    with pytest.raises(EmbeddedPostgresError, match="no embedded PostgreSQL 9; there are 16, 18"):
        EmbeddedPostgres(home, version=9).start()


def test_data_of_another_version_is_refused_with_the_remedy(home: Path) -> None:
    with EmbeddedPostgres(home):
        pass
    wait_until(lambda: not (home / "data" / "postmaster.pid").exists())
    with pytest.raises(EmbeddedPostgresError, match="belongs to PostgreSQL 18, not 16; 'make clean' removes it"):
        EmbeddedPostgres(home, version=16).start()


def test_a_server_that_does_not_start_shows_its_log(home: Path) -> None:
    with pytest.raises(EmbeddedPostgresError, match="invalid value for parameter"):
        EmbeddedPostgres(home, settings={"shared_buffers": "nonsense"}).start()


def test_without_the_extra_the_error_names_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EmbeddedPostgresError, match=r"pip install 'commandbus\[embedded\]'"):
        EmbeddedPostgres(home).start()


def test_a_base_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(EmbeddedPostgresError, match="not a folder of your own"):
        EmbeddedPostgres(tmp_path / "link" / "home").start()


@pytest.mark.skipif(os.getuid() != 0, reason="only root has to let another user in")
def test_as_root_a_private_folder_stays_private(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    with pytest.raises(EmbeddedPostgresError, match="it stays closed"):
        EmbeddedPostgres(private / "base" / "home").start()
    assert private.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root has to let another user in")
def test_as_root_binaries_in_a_private_folder_are_copied_out(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_others_may_pass", lambda folder: "site-packages" not in str(folder))
    with EmbeddedPostgres(home) as server:
        copy = server.binaries()
        assert copy.is_relative_to(home.parent)
        server.restart()
    wait_until(lambda: not (home / "data" / "postmaster.pid").exists())
    shutil.rmtree(copy.parents[2])


def test_without_a_user_to_run_it_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr("pwd.getpwnam", unknown)
    with pytest.raises(EmbeddedPostgresError, match="no user 'postgres' or 'nobody'"):
        embedded._account()


def test_removing_what_is_not_there_is_nothing(tmp_path: Path) -> None:
    remove(tmp_path / "nothing")
