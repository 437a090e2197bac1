"""One local Spark session for all tests of a process: it takes longer to start than most tests to run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import connections
from pyspark.sql import SparkSession

from commandbus import spark as commandbus_spark
from tests.helpers import unmeasured
from tests.settings import TEST_SERVER
from tests.spark.shell import CSV


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    folder = tmp_path_factory.mktemp("spark")
    measuring = {name: os.environ.pop(name) for name in set(os.environ) - set(unmeasured(os.environ))}
    session = commandbus_spark.session(
        "tests",
        master="local[2]",
        config={
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.driver.memory": "1g",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
        },
    )
    os.environ.update(measuring)
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def url(transactional_db: None) -> str:
    """Of the test database. Spark's processes commit, and see what is committed."""
    return TEST_SERVER.url(connections["default"].settings_dict["NAME"])


@pytest.fixture
def csv(tmp_path: Path) -> str:
    path = tmp_path / "payouts.csv"
    path.write_text(CSV)
    return str(path)
