"""A Spark session that knows `format("commandbus")`, and what it has to be told if it cannot be."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commandbus.exceptions import ConfigurationError
from commandbus.spark.packages import OLDEST, OLDEST_NAME, check_packages, version_of
from commandbus.spark.reasons import reason

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOPBACK = "127.0.0.1"
MASTERS = r"(local(\[.+\])?|local-cluster\[.+\]|spark://.+|k8s://.+|yarn)$"
MASTERS_NAMES = "local, local[2], local[*], spark://host:7077, yarn or k8s://…"
_shipped: set[str] = set()


def session(
    name: str = "commandbus", *, master: str | None = None, config: Mapping[str, str] | None = None
) -> SparkSession:
    """The Spark session of this process, made if there is none, with `format("commandbus")`.

    `master`: local[*] if nobody says otherwise. On a cluster, the executors get commandbus as a zip; psycopg and
    pyarrow must be installed there.
    """
    check_packages()
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is None:
        from commandbus.spark import java

        java.prepare()
    # And not what is called python3 there. Spark itself reads this setting only if spark-submit has.
    os.environ.setdefault("PYSPARK_PYTHON", (config or {}).get("spark.pyspark.python", sys.executable))
    settings = _settings(master, config or {})
    where = settings.get("spark.master", "that of spark-submit")
    if "spark.master" in settings and not re.match(MASTERS, where):
        raise ConfigurationError(f"there is no master {where!r}; it is {MASTERS_NAMES}")
    builder: Any = SparkSession.builder.appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        made: SparkSession = builder.getOrCreate()
    except Exception as error:
        raise ConfigurationError(f"Spark does not start (master {where}): {reason(error)}") from error
    return register(made)


def _settings(master: str | None, config: Mapping[str, str]) -> dict[str, str]:
    """What was asked for. What runs on this machine only is reached from this machine only."""
    where = master or config.get("spark.master") or (None if _is_submitted() else "local[*]")
    here = {"spark.driver.host": LOOPBACK, "spark.driver.bindAddress": LOOPBACK}
    return {
        **({} if where is None else {"spark.master": where}),
        **(here if where is not None and where.startswith("local") else {}),
        **{name: value for name, value in config.items() if name != "spark.master"},
    }


def register(spark: SparkSession) -> SparkSession:
    """Let a session know `format("commandbus")`; answers the session.

    Spark looks for data sources in the session that is active in a thread, and in a new thread none is. So a thread
    that writes calls this first.
    """
    check_packages()
    if version_of(spark.version) < OLDEST:
        raise ConfigurationError(f"this is Spark {spark.version}, and commandbus needs {OLDEST_NAME} or newer")
    from commandbus.spark.source import CommandBusDataSource

    spark.dataSource.register(CommandBusDataSource)
    if not _is_connect(spark):
        _activate(spark)
        _ship(spark)
    return spark


def _activate(spark: SparkSession) -> None:
    java_session: Any = spark._jsparkSession
    spark._get_j_spark_session_class(spark._jvm).setActiveSession(java_session)


def _ship(spark: SparkSession) -> None:
    """To executors on other machines. What spark-submit was given as --py-files is there already."""
    from commandbus.spark.package import build_zip

    context = spark.sparkContext
    is_local = re.fullmatch(r"local(\[.*)?", context.master or "") is not None
    if is_local or context.applicationId in _shipped or not Path(__file__).exists():
        return
    folder = Path(tempfile.mkdtemp(prefix="commandbus-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # the executors fetch it when they start
    context.addPyFile(str(build_zip(folder / "commandbus.zip")))
    _shipped.add(context.applicationId)


def _is_connect(spark: SparkSession) -> bool:
    return "connect" in type(spark).__module__


def _is_submitted() -> bool:
    """Whether spark-submit has started us, and has said where to run."""
    return "PYSPARK_GATEWAY_PORT" in os.environ
