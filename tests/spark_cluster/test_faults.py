"""What goes wrong in a cluster: tasks, executors, connections, PostgreSQL. Each command is sent once all the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connections
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from commandbus import get_batch
from commandbus import spark as commandbus_spark
from commandbus.models import Command, SparkJob
from commandbus.spark.source import CommandBusDataSource
from tests.helpers import libpq_parameters
from tests.settings import TEST_SERVER
from tests.spark_cluster.cluster import PATIENCE, Cluster
from tests.spark_cluster.remote import Batches, DisconnectedSource, LateSource, SlowSource, fail_once, look, slowly

COLUMNS = "command_type string, key string, data string"


def frame(spark: SparkSession, count: int, change: Callable[[Batches], Batches] | None = None) -> DataFrame:
    """In two partitions, a hundred rows at a time; `change` runs in the tasks."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    rows = spark.range(0, count, 1, 2).selectExpr(
        "'PlaceOrder' AS command_type", "cast(id AS string) AS key", "'{}' AS data"
    )
    return rows if change is None else rows.mapInArrow(change, COLUMNS)


def until(condition: Callable[[], object], what: str) -> None:
    """As wait_until, for a Spark that starts beside other things on two cores."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come in {PATIENCE} seconds"
        time.sleep(0.05)


def write(df: DataFrame, url: str, source: type[CommandBusDataSource] = CommandBusDataSource, **options: str) -> None:
    commandbus_spark.register(df.sparkSession)  # some tests write in a thread
    df.sparkSession.dataSource.register(source)
    given = {"url": url, "domain": "orders", "jobId": "job", "chunkRows": "100", **options}
    df.write.format(source.name()).mode("append").options(**given).save()


def in_background(action: Callable[[], None]) -> Future[None]:
    pool = ThreadPoolExecutor(1)
    done = pool.submit(action)
    pool.shutdown(wait=False)
    return done


def sent() -> int:
    """On a connection of its own, for PostgreSQL comes and goes in some tests."""
    try:
        with psycopg.connect(**libpq_parameters()) as connection:
            row = connection.execute("SELECT count(*) FROM command_bus_command").fetchone()
            return 0 if row is None else int(row[0])
    except psycopg.OperationalError:
        return 0


def deadlocks() -> int:
    """That sessions of this database have told of; they do so when they end."""
    until(lambda: sessions() == 0, "the end of all connections")
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        return int(cursor.fetchone()[0])


def sessions() -> int:
    """Those of Spark's processes."""
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'commandbus spark%'")
        return int(cursor.fetchone()[0])


def check(count: int, job_id: str = "job") -> SparkJob:
    """Each command once, and counted once."""
    job = SparkJob.objects.get(job_id=job_id)
    assert (job.status, job.sent_count, job.duplicate_count, job.row_count) == ("COMPLETED", count, 0, count)
    assert Command.objects.count() == count
    return job


def test_the_executors_have_nothing_but_what_was_shipped(spark: SparkSession) -> None:
    [row] = spark.range(1).mapInArrow(look, "where string, found string").collect()
    assert "commandbus.zip" in row["where"]
    assert row["found"] == "[]"


def test_a_batch_of_many_rows_is_sent_once_and_sealed(spark: SparkSession, url: str) -> None:
    write(frame(spark, 5000), url, batchName="Payouts", onCompleteType="Summarize")
    job = check(5000)
    assert job.batch_id is not None
    batch = get_batch("orders", job.batch_id)
    assert batch is not None
    assert (batch.total_count, batch.is_open) == (5000, False)


def test_a_task_that_fails_is_tried_again(spark: SparkSession, url: str) -> None:
    write(frame(spark, 1000, fail_once), url)
    check(1000)


def test_a_killed_executor_loses_and_doubles_nothing(spark: SparkSession, url: str, machines: Cluster) -> None:
    done = in_background(lambda: write(frame(spark, 4000), url, SlowSource))
    until(lambda: sent() > 400 or done.done(), "a part of the commands")
    assert not done.done(), str(done.exception())
    os.kill(machines.executors()[0], signal.SIGKILL)
    done.result(120)
    check(4000)


def test_a_lost_connection_is_opened_again(spark: SparkSession, url: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    write(frame(spark, 2000), url, DisconnectedSource, note=str(note))
    ended = [int(line) for line in note.read_text().splitlines()]
    assert len(ended) >= 4  # twice in each of two tasks
    assert sum(ended) >= 2  # one may find that the other has just ended both
    check(2000)


def test_postgresql_is_restarted_during_a_job(spark: SparkSession, url: str) -> None:
    done = in_background(lambda: write(frame(spark, 3000), url, SlowSource))
    until(lambda: sent() > 300 or done.done(), "a part of the commands")
    assert not done.done(), str(done.exception())
    connections.close_all()
    TEST_SERVER.restart("immediate", pause=1)
    done.result(120)
    check(3000)


def test_two_jobs_send_the_same_ids_in_opposite_order(spark: SparkSession, url: str) -> None:
    before = deadlocks()
    rows = frame(spark, 20_000)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "2000")
    chunk = rows["key"].cast("int") / 2000  # both have the same rows in a chunk, so that they meet in each
    ordered = [rows.sort(chunk.cast("int"), order).coalesce(1) for order in (rows["key"].asc(), rows["key"].desc())]

    def send(number: int) -> None:
        write(ordered[number], url, jobId=f"job{number}", chunkRows="2000")

    for job in [in_background(partial(send, number)) for number in range(2)]:
        job.result(120)
    assert Command.objects.count() == 20_000
    found = SparkJob.objects.all()
    assert sum(job.sent_count for job in found) == 20_000
    assert sum(job.duplicate_count for job in found) == 20_000
    assert deadlocks() == before  # one would have been repeated without a word


def test_an_attempt_that_spark_gave_up_writes_nothing_after_the_commit(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    write(frame(spark, 1000), url, LateSource, batchName="B", note=str(note))
    until(note.exists, "the late attempt")
    until(lambda: note.read_text() != "", "what the late attempt met")
    assert "job 'job' has ended (COMPLETED), so this attempt of a task writes nothing" in note.read_text()
    check(1000)


def test_a_stream_goes_on_from_its_checkpoint(spark: SparkSession, url: str, tmp_path: Path) -> None:
    source, checkpoint = str(tmp_path / "in"), str(tmp_path / "checkpoint")
    for part in range(4):
        rows = frame(spark, 100).selectExpr("command_type", f"concat('{part}-', key) AS key", "data")
        rows.coalesce(1).write.mode("append").json(source)

    def start() -> Any:
        rows = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).json(source)
        stream = rows.mapInArrow(slowly, COLUMNS).writeStream.format("commandbus")
        options = {"url": url, "domain": "orders", "checkpointLocation": checkpoint, "jobId": "stream"}
        return stream.options(**options).trigger(availableNow=True).start()

    first = start()
    until(lambda: sent() >= 100, "the first micro-batch")
    first.stop()
    assert start().awaitTermination(120)
    assert Command.objects.count() == 400
    assert SparkJob.objects.get().sent_count == 400


def test_rows_that_cannot_be_sent_end_the_job_and_name_the_row(spark: SparkSession, url: str) -> None:
    df = frame(spark, 1000).selectExpr("command_type", "key", "if(key = '700', '[]', data) AS data")
    with pytest.raises(PySparkException, match="row 201 of partition 1, command_id"):
        write(df, url)
    assert SparkJob.objects.get().status == "FAILED"
    write(frame(spark, 1000), url)
    check(1000)


def test_sessions_are_all_closed(url: str) -> None:
    """Whoever runs before: nobody keeps a connection."""
    until(lambda: sessions() == 0, "the end of all connections")
    assert threading.active_count() < 50
