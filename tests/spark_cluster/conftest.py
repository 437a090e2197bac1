"""Tests on a real multi-process Spark: `make test-spark`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import connections
from pyspark.sql import SparkSession

from commandbus import spark as commandbus_spark
from commandbus.spark import java
from tests.settings import TEST_SERVER
from tests.spark_cluster.cluster import HOSTS, Cluster, cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.spark_cluster)


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    java.prepare()
    with cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="session")
def spark(machines: Cluster) -> Iterator[SparkSession]:
    """A session of two executors with one core each, that goes on when one is lost."""
    events = machines.folder / "events"
    events.mkdir()
    session = commandbus_spark.session(
        "tests",
        master=machines.master,
        config={
            "spark.driver.host": HOSTS[0],
            "spark.driver.bindAddress": HOSTS[0],
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.cores.max": "2",
            "spark.pyspark.python": machines.python(),
            "spark.ui.showConsoleProgress": "false",
            "spark.ui.port": "0",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",  # so that it can be searched
            "spark.eventLog.dir": events.as_uri(),
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(machines.folder / "warehouse"),
            "spark.speculation": "true",
            "spark.speculation.interval": "200ms",
            "spark.speculation.multiplier": "2",
            "spark.speculation.quantile": "0.5",
            "spark.speculation.minTaskRuntime": "1s",
            "spark.task.maxFailures": "4",
            "spark.python.task.killTimeout": "30s",  # an attempt that is given up goes on for so long
        },
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def url(transactional_db: None) -> str:
    return TEST_SERVER.url(connections["default"].settings_dict["NAME"])
