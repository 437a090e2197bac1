"""A password in the url is found nowhere: not in event logs, logs of executors, plans, pages or errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from commandbus import spark as commandbus_spark
from commandbus.models import Command
from tests.spark_cluster.cluster import Cluster
from tests.spark_cluster.test_faults import frame

SECRET = "hunter2-in-the-url"
PAGES = ["jobs/", "stages/", "environment/", "executors/", "SQL/", "SQL/execution/?id=0", "storage/"]
API = ["jobs", "stages", "sql?details=true&planDescription=true&length=1000", "environment", "allexecutors"]


def pages(spark: SparkSession) -> str:
    place = spark.sparkContext.uiWebUrl
    assert place is not None
    application = f"{place}/api/v1/applications/{spark.sparkContext.applicationId}"
    texts = []
    for address in [*(f"{place}/{page}" for page in PAGES), *(f"{application}/{what}" for what in API)]:
        with urlopen(address, timeout=30) as answer:  # noqa: S310 - Spark's own pages, on this machine
            texts.append(answer.read().decode(errors="replace"))
    for execution in json.loads(texts[len(PAGES) + 2]):
        with urlopen(f"{place}/SQL/execution/?id={execution['id']}", timeout=30) as answer:  # noqa: S310
            texts.append(answer.read().decode(errors="replace"))
    return "\n".join(texts)


def streamed(spark: SparkSession, folder: Path, place: str) -> str:
    """What a query tells of itself that has sent to a place with a password. Its checkpoint is in the folder."""
    frame(spark, 10).write.json(str(folder / "in"))
    stream = spark.readStream.schema(frame(spark, 1).schema).json(str(folder / "in")).writeStream.format("commandbus")
    options = {"url": place, "domain": "orders", "checkpointLocation": str(folder / "checkpoint")}
    query = stream.options(**options).trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    assert Command.objects.count() == 300  # the same ten were sent before
    return f"{query.lastProgress} {query.status} {query.exception()}"


def files_with(text: str, folder: Path) -> list[str]:
    sought = text.encode()
    return [str(file) for file in folder.rglob("*") if file.is_file() and sought in file.read_bytes()]


def test_a_password_is_found_nowhere(
    spark: SparkSession, url: str, machines: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    spark.sparkContext.setLogLevel("INFO")
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"CREATE ROLE secretive SUPERUSER LOGIN PASSWORD '{SECRET}'")
        place = url.replace("postgres@", f"secretive:{SECRET}@")
        wrong = f"postgresql://u:{SECRET}@/d?host=/nowhere"
        errors: list[str] = []
        options: dict[str, Any] = {"url": place, "domain": "orders", "job_id": "the-job", "on_invalid": "reject"}
        assert commandbus_spark.send(frame(spark, 300), **options).sent == 300
        for bad in (
            {"url": wrong, "domain": "orders"},
            {"url": f"postgresql//u:{SECRET}@h", "domain": "orders"},
            {"url": place, "domain": "nowhere"},
        ):
            with pytest.raises(PySparkException) as caught:
                frame(spark, 3).write.format("commandbus").mode("append").options(**bad).save()
            errors.append(str(caught.value))
        broken = frame(spark, 300).selectExpr("command_type", "key", "'[' AS data")
        with pytest.raises(PySparkException) as caught:
            broken.write.format("commandbus").mode("append").options(url=place, domain="orders").save()
        errors.append(str(caught.value))
        told = streamed(spark, machines.folder / "stream", place)
        rejects = spark.read.format("commandbus").options(url=place, table="rejects", jobId="the-job").load()
        rejects.explain(extended=True)
        rejects.count()
    finally:
        spark.sparkContext.setLogLevel("OFF")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("DROP ROLE secretive")
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err
    assert SECRET not in "\n".join(errors)
    assert '"numOutputRows": 10' in told  # its sink has spoken
    assert SECRET not in told
    text = pages(spark)
    assert "the-job" in text or "commandbus" in text  # what was looked at is what was meant
    assert SECRET not in text
    assert files_with("commandbus", machines.folder / "events")
    assert files_with(SECRET, machines.folder) == []
