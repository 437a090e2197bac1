"""`df.write.format("commandbus")` and `commandbus.spark.send` on a real local Spark session."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_DNS, UUID, uuid4, uuid5

import pyarrow as pa
import pytest
from django.db import connections
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from commandbus import ConfigurationError, InvalidCommandError, UnknownDomainError, send_command
from commandbus import spark as bus
from commandbus.exceptions import SparkJobRefusedError, UnreachableError
from commandbus.ids import derived_id
from commandbus.models import Command, SparkJob
from commandbus.spark import Job, reader, send
from commandbus.spark.checking import count_rows
from commandbus.spark.connection import Session
from commandbus.spark.jobs import find_job
from commandbus.spark.options import WriteOptions
from commandbus.spark.sending import text_of
from commandbus.spark.writer import CommandWriter
from commandbus.transitions import PostgresTransitions

COLUMNS = "command_type string, command_id string, data string"


def frame(spark: SparkSession, count: int = 10, data: str = "struct(id AS n)") -> DataFrame:
    """Rows with an id each, the same whenever they are asked for."""
    return spark.range(0, count, 1, 2).selectExpr(
        "'PlaceOrder' AS command_type", "cast(id AS string) AS key", f"{data} AS data"
    )


def slow(df: DataFrame) -> DataFrame:
    """So that those who look twice a second see it."""

    def pause(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        time.sleep(2)
        yield from batches

    return df.mapInArrow(pause, df.schema)


def write(df: DataFrame, place: str, mode: str = "append", **options: Any) -> None:
    options = {"url": place, "domain": "orders", "jobId": "job", **options}
    df.write.format("commandbus").mode(mode).options(**options).save()


def test_each_row_becomes_a_command_with_the_id_of_its_key(spark: SparkSession, url: str) -> None:
    write(frame(spark), url)
    ids = {derived_id("orders", "PlaceOrder", [str(n)]) for n in range(10)}
    assert set(Command.objects.values_list("command_id", flat=True)) == ids
    seven = derived_id("orders", "PlaceOrder", ["7"])
    assert PostgresTransitions("default").payloads("orders", [seven]) == {seven: {"n": 7}}
    job = SparkJob.objects.get()
    assert (job.status, job.row_count, job.sent_count, job.duplicate_count) == ("COMPLETED", 10, 10, 0)


def test_to_write_again_sends_nothing_twice(spark: SparkSession, url: str) -> None:
    write(frame(spark), url)
    write(frame(spark, 15), url, jobId="another")
    assert Command.objects.count() == 15
    job = SparkJob.objects.get(job_id="another")
    assert (job.sent_count, job.duplicate_count) == (5, 10)


def test_what_cannot_be_sent_is_read_back_as_a_dataframe(spark: SparkSession, url: str) -> None:
    data = "if(id % 3 = 0, concat('{\"n\": ', id), '{}')"
    write(frame(spark, 9, data), url, onInvalid="reject")
    rejects = spark.read.format("commandbus").options(url=url, table="rejects", jobId="job", numPartitions=3).load()
    rows = rejects.orderBy("data").collect()
    assert [row["data"] for row in rows] == ['{"n": 0', '{"n": 3', '{"n": 6']
    assert {row["reason"] for row in rows} == {
        "its data cannot be read as JSON: invalid input syntax for type json",
    }
    assert Command.objects.count() == 6


def test_an_atomic_job_with_one_bad_row_sends_nothing(spark: SparkSession, url: str) -> None:
    with pytest.raises(PySparkException, match="cannot be sent: its data must be a JSON object, not array"):
        write(frame(spark, 9, "if(id = 8, '[]', '{}')"), url, atomic="true")
    assert not Command.objects.exists()
    assert SparkJob.objects.get().status == "FAILED"
    write(frame(spark, 9, "'{}'"), url, atomic="true")
    assert Command.objects.count() == 9


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("overwrite", {}, "what was sent cannot be overwritten; write with mode"),
        ("append", {"domain": "paymnts"}, "domain 'paymnts' is not registered; known: "),
        ("append", {"url": "postgresql//x:hunter2@h/d"}, "the url cannot be read"),
        ("append", {"url": "postgresql://x:hunter2@/d?host=/nowhere"}, "PostgreSQL cannot be reached"),
        ("append", {"batch": "x"}, "there is no option 'batch'; did you mean batchName?"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    spark: SparkSession, url: str, mode: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(PySparkException) as caught:
        write(frame(spark), url, mode, **options)
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert not SparkJob.objects.exists()


def test_plans_show_no_password(spark: SparkSession, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    secret = f"{url}&password=hunter2"
    write(frame(spark, 3, "'['"), secret, onInvalid="reject")
    rejects = spark.read.format("commandbus").options(url=secret, table="rejects", jobId="job").load()
    rejects.explain(extended=True)
    shown = capsys.readouterr().out
    assert "commandbus" in shown
    assert "hunter2" not in shown


def test_send_answers_what_became_of_the_rows(spark: SparkSession, url: str) -> None:
    known = derived_id("orders", "PlaceOrder", ["1"])
    send_command("orders", "PlaceOrder", known, {"n": 1})
    seen: list[Job] = []
    job = send(frame(spark), url=url, domain="orders", job_id="job", batch_name="B", atomic=False, show=seen.append)
    assert (job.status, job.rows, job.sent, job.duplicate, job.rejected) == ("COMPLETED", 10, 9, 1, 0)
    assert job.batch_id is not None
    assert Command.objects.filter(batch_id=job.batch_id).count() == 9


def test_send_does_not_take_the_run_of_somebody_else_for_its_own(
    spark: SparkSession, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(session: Session, job_id: str) -> Job | None:
        if find_job(session, job_id) is not None:
            session.call("SELECT commandbus.open_spark_job(%s, 'orders')", [job_id])
        return find_job(session, job_id)

    monkeypatch.setattr("commandbus.spark.sending.find_job", late)
    with pytest.raises(SparkJobRefusedError, match="job 'job' was begun more than once at the same time"):
        send(frame(spark), url=url, domain="orders", job_id="job")


def test_send_shows_the_job_while_it_runs(spark: SparkSession, url: str) -> None:
    seen: list[Job] = []
    send(slow(frame(spark)), url=url, domain="orders", job_id="job", show=seen.append)
    assert {job.job_id for job in seen} == {"job"}
    assert {job.status for job in seen} == {"RUNNING"}


def test_nothing_is_sent_of_a_dataframe_without_rows(spark: SparkSession, url: str) -> None:
    without_tasks = spark.createDataFrame(spark.sparkContext.emptyRDD(), frame(spark).schema)
    assert without_tasks.rdd.getNumPartitions() == 0
    for rows in (without_tasks, frame(spark).where("key = 'none'")):
        job = send(rows, url=url, domain="orders", job_id="empty")
        assert (job.status, job.rows, job.sent) == ("COMPLETED", 0, 0)


def test_a_batch_has_a_job_that_can_go_on(spark: SparkSession, url: str) -> None:
    with pytest.raises(ConfigurationError, match="a batch needs the option jobId"):
        send(frame(spark), url=url, domain="orders", batch_name="B")


def test_an_error_names_the_job_and_so_does_the_job_itself(spark: SparkSession, url: str) -> None:
    with pytest.raises(InvalidCommandError, match=r"cannot be sent: .* \(job the-job\)"):
        send(frame(spark, 9, "if(id = 8, '[]', '{}')"), url=url, domain="orders", job_id="the-job")
    job = SparkJob.objects.get(job_id="the-job")
    assert job.status == "FAILED"
    assert "its data must be a JSON object, not array" in (job.error or "")


def test_an_atomic_job_that_cannot_be_ended_says_why(spark: SparkSession, url: str) -> None:
    known = derived_id("orders", "PlaceOrder", ["1"])
    send_command("orders", "PlaceOrder", known, {"n": 1})

    def interfere(job: Job) -> None:
        send_command("orders", "PlaceOrder", derived_id("orders", "PlaceOrder", ["2"]), {"n": 99})
        connections.close_all()  # of this thread

    with pytest.raises(InvalidCommandError, match="cannot be sent: it was sent before with another type or other data"):
        send(slow(frame(spark, 3)), url=url, domain="orders", job_id="job", atomic=True, show=interfere)
    assert "it was sent before with another type or other data" in (SparkJob.objects.get().error or "")
    assert Command.objects.count() == 2


def test_send_raises_our_own_errors(spark: SparkSession, url: str) -> None:
    with pytest.raises(UnknownDomainError, match="domain 'paymnts' is not registered"):
        send(frame(spark), url=url, domain="paymnts")
    with pytest.raises(UnreachableError, match="PostgreSQL cannot be reached"):
        send(frame(spark), url="postgresql:///d?host=/nowhere", domain="orders")
    with pytest.raises(InvalidCommandError, match="of partition 1, command_id"):
        send(frame(spark, 9, "if(id = 8, '[]', '{}')"), url=url, domain="orders")
    with pytest.raises(ConfigurationError, match="an option is text, a number"):
        send(frame(spark), url=url, domain="orders", job_id=object())
    with pytest.raises(PySparkException, match="DIVIDE_BY_ZERO"):
        send(frame(spark, 3, "struct(1 / (id - 1) AS n)"), url=url, domain="other")


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("uuid()", "uuid"),
        ("cast(monotonically_increasing_id() AS string)", "monotonically_increasing_id"),
        ("cast(rand() AS string)", "rand"),
        ("cast(current_timestamp() AS string)", "current_timestamp"),
    ],
)
def test_ids_that_change_whenever_they_are_computed_are_refused(
    spark: SparkSession, url: str, expression: str, name: str
) -> None:
    df = frame(spark).drop("key").withColumn("command_id", F.expr(expression))
    with pytest.raises(ConfigurationError) as caught:
        send(df, url=url, domain="orders")
    assert f"{name}() is not" in str(caught.value)


@pytest.mark.parametrize(
    "data", ["struct(current_timestamp() AS at)", "struct(cast(unix_timestamp() AS string) AS at)"]
)
def test_data_that_change_with_the_time_are_refused(spark: SparkSession, url: str, data: str) -> None:
    """A job with them could never be completed, once it was killed."""
    with pytest.raises(ConfigurationError, match="must be the same whenever they are computed"):
        send(frame(spark, data=data), url=url, domain="orders")
    later = frame(spark).drop("data").withColumn("at", F.current_timestamp())
    with pytest.raises(ConfigurationError, match=r"current_timestamp\(\) is not"):
        send(later.selectExpr("command_type", "key", "struct(at) AS data"), url=url, domain="orders")


@pytest.mark.parametrize(
    "query",
    [
        "SELECT 'a' AS key FROM n UNION ALL SELECT cast(now() AS string) FROM n",
        "SELECT at AS key FROM n LATERAL VIEW explode(array(cast(now() AS string))) AS at",
        "SELECT (SELECT cast(max(now()) AS string) FROM n) AS key FROM n",
        "SELECT cast(id IN (SELECT id FROM n WHERE now() > '2020-01-01') AS string) AS key FROM n",
        "WITH t AS (SELECT id, cast(now() AS string) AS at FROM n) SELECT b.at AS key FROM t JOIN t AS b USING (id)",
        "SELECT x.at AS key FROM n, LATERAL (SELECT concat(n.id, now()) AS at) AS x",
        "SELECT cast(now() AS string) AS key FROM n GROUP BY CUBE(id)",
    ],
)
def test_the_time_is_found_wherever_a_column_comes_from(spark: SparkSession, url: str, query: str) -> None:
    spark.range(3).createOrReplaceTempView("n")
    df = spark.sql(query).selectExpr("'PlaceOrder' AS command_type", "key", "'{}' AS data")
    with pytest.raises(ConfigurationError, match=r"now\(\) is not"):
        send(df, url=url, domain="orders")


def test_random_ids_are_found_behind_a_cache(spark: SparkSession, url: str) -> None:
    """Another session would not have it."""
    df = frame(spark).drop("key").withColumn("command_id", F.expr("uuid()")).cache()
    assert df.count() == 10
    with pytest.raises(ConfigurationError, match=r"uuid\(\) is not"):
        send(df, url=url, domain="orders")


def test_the_time_of_a_column_and_a_delay_until_then_are_right(spark: SparkSession, url: str) -> None:
    at = frame(spark).withColumn("at", F.timestamp_seconds(F.col("key").cast("int")))
    df = at.selectExpr(
        "command_type",
        "key",
        "struct(unix_timestamp(at) AS at) AS data",
        "greatest(0, unix_timestamp(at) - unix_timestamp()) AS delay",
    )
    assert send(df.cache(), url=url, domain="orders").sent == 10


def test_a_random_delay_and_a_filter_by_date_are_nobodys_harm(spark: SparkSession, url: str) -> None:
    df = frame(spark).withColumn("delay", F.rand() * 60).filter("current_date() > date'2026-01-01'")
    assert send(df, url=url, domain="orders").sent == 10


def test_ids_of_columns_are_those_of_python(spark: SparkSession) -> None:
    controls = "".join(map(chr, range(1, 32)))
    keys = ["", "a", "ü€😀", '"', "\\", "\\u001F", "/", "\x7f", "\u2028", controls, *map(str, range(200))]
    df = spark.createDataFrame(
        [(key, number, number % 2 == 0) for number, key in enumerate(keys)], "k string, n int, b boolean"
    )
    rows = df.select(
        "*",
        bus.uuid5(NAMESPACE_DNS, "k").alias("five"),
        bus.derived_id("orders", "Ship", "k", "n", F.col("b")).alias("derived"),
        bus.derived_id("orders", F.lit("Ship"), "k").alias("by_column"),
    ).collect()
    assert len(rows) == len(keys)
    for row in rows:
        assert row["five"] == str(uuid5(NAMESPACE_DNS, row["k"]))
        assert row["derived"] == str(derived_id("orders", "Ship", [row["k"], row["n"], row["b"]]))
        assert row["by_column"] == str(derived_id("orders", "Ship", [row["k"]]))
    [nothing] = spark.sql("SELECT cast(NULL AS string) AS k").select(bus.derived_id("o", "T", "k").alias("i")).collect()
    assert nothing["i"] is None
    with pytest.raises(PySparkException, match="a key of the type double has no text that is the same everywhere"):
        spark.sql("SELECT 0.5D AS k").select(bus.derived_id("o", "T", "k")).collect()


def test_a_stream_sends_each_row_once_also_after_a_restart(spark: SparkSession, url: str, tmp_path: Any) -> None:
    source, checkpoint = str(tmp_path / "in"), str(tmp_path / "checkpoint")

    def add(*keys: int) -> None:
        rows = [("PlaceOrder", str(UUID(int=key + 1)), "{}") for key in keys]
        spark.createDataFrame(rows, COLUMNS).coalesce(1).write.mode("append").json(source)

    def run(**options: str) -> None:
        stream = spark.readStream.schema(COLUMNS)
        query = (
            stream.option("maxFilesPerTrigger", 1)
            .json(source)
            .writeStream.format("commandbus")
            .options(url=url, domain="orders", checkpointLocation=checkpoint, **options)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    add(0, 1)
    add(2)
    run()
    add(3, 4)
    run()
    assert Command.objects.count() == 5
    job = SparkJob.objects.get()
    assert job.job_id.startswith("stream-")
    assert (job.row_count, job.sent_count, job.duplicate_count, job.stream_batch) == (5, 5, 0, 2)

    # As if the process had died after our commit and before Spark had written its own.
    (tmp_path / "checkpoint" / "commits" / "2").unlink()
    (tmp_path / "checkpoint" / "commits" / ".2.crc").unlink(missing_ok=True)
    run()
    job.refresh_from_db()
    assert (Command.objects.count(), job.row_count, job.sent_count, job.duplicate_count) == (5, 5, 5, 0)


def test_two_queries_do_not_share_a_job(spark: SparkSession, url: str, tmp_path: Any) -> None:
    frame(spark, 3, "'{}'").coalesce(1).write.json(str(tmp_path / "in"))
    stream = spark.readStream.schema("command_type string, key string, data string").json(str(tmp_path / "in"))
    writer = stream.writeStream.format("commandbus").options(url=url, domain="orders", jobId="payouts")

    def run(checkpoint: str) -> None:
        query = writer.option("checkpointLocation", str(tmp_path / checkpoint)).trigger(availableNow=True).start()
        query.awaitTermination()

    run("first")
    run("first")
    with pytest.raises(PySparkException, match="there is a job 'payouts' already: it sends another query, or the same"):
        run("second")
    assert SparkJob.objects.get().row_count == 3


def test_rejects_are_corrected_and_sent_again_under_the_same_job(spark: SparkSession, url: str) -> None:
    options: dict[str, Any] = {"url": url, "domain": "orders", "job_id": "june"}
    job = send(frame(spark, 3, "if(id = 1, '{', '{}')"), **options, on_invalid="reject")
    assert (job.sent, job.rejected) == (2, 1)
    rejects = spark.read.format("commandbus").options(url=url, table="rejects", jobId="june").load()
    corrected = rejects.selectExpr("command_type", "command_id", "'{\"n\": 1}' AS data")
    job = send(corrected, **options)
    assert (job.rows, job.sent, job.sent_before, job.rejected) == (1, 3, 2, 0)
    assert Command.objects.count() == 3
    assert read_rejects(spark, url, "june") == []


def read_rejects(spark: SparkSession, url: str, job_id: str, **options: str) -> list[str]:
    rejects = spark.read.format("commandbus").options(url=url, table="rejects", jobId=job_id, **options).load()
    return sorted(row["data"] for row in rejects.collect())


def test_a_correction_that_is_killed_or_has_a_part_only_leaves_the_rest_to_be_read(
    spark: SparkSession, url: str
) -> None:
    options: dict[str, Any] = {"url": url, "domain": "orders", "job_id": "june", "on_invalid": "reject"}
    bad = ["{0", "{1", "{2"]
    send(frame(spark, 3, "concat('{', id)"), **options)
    assert read_rejects(spark, url, "june") == bad
    wanted = WriteOptions.of(text_of({**options}))
    killed = CommandWriter(wanted, frame(spark, 1).schema)
    killed.write(iter(frame(spark, 1, "'[1]'").toArrow().to_batches()))
    assert read_rejects(spark, url, "june") == bad
    send(frame(spark, 2, "'{}'"), **options)
    assert read_rejects(spark, url, "june") == []
    assert read_rejects(spark, url, "june", run="1") == bad


def test_rejects_of_a_job_that_is_not_there_are_an_error(spark: SparkSession, url: str) -> None:
    for options in ({}, {"run": "1"}):
        with pytest.raises(PySparkException, match="there is no job 'jnue' in this database"):
            read_rejects(spark, url, "jnue", **options)


def test_large_rejects_are_read_a_few_at_a_time() -> None:
    moment = datetime(2026, 5, 1, tzinfo=UTC)
    rows = [
        ("job", "id", "T", size * "x", None, None, "too large", None, moment) for size in [1] * 1500 + [3 << 20] * 3
    ]
    batches = list(reader._batches(rows))
    assert [batch.num_rows for batch in batches] == [1000, 502, 1]
    assert batches[0].to_pylist()[0]["rejected_at"] == moment


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            "struct(parse_json('{}') AS v)",
            "data.v has the type variant, which JSON cannot hold; cast it to text, or use",
        ),
        ("struct(array(interval 1 day) AS d)", "data.d[] has the type interval day, which JSON cannot hold"),
        ("struct(map(1, 'x') AS m)", "data.m is a map with keys of type int; cast them to text"),
    ],
)
def test_what_json_cannot_hold_is_named_before_anything_runs(
    spark: SparkSession, url: str, data: str, message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        send(frame(spark, data=data), url=url, domain="orders")
    assert message in str(caught.value)
    assert not SparkJob.objects.exists()


@pytest.mark.parametrize("zone", ["UTC", "GMT+8", "+08", "Z", "America/New_York"])
def test_a_moment_is_the_same_text_in_every_time_zone(spark: SparkSession, url: str, zone: str) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        moment = "timestamp'0001-01-01T00:00:00Z'"
        data = (
            f"struct({moment} AS at, array({moment}) AS list, map('a', {moment}) AS map, struct({moment} AS at) AS s)"
        )
        write(frame(spark, 1, data), url)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before or "UTC")
    text = "0001-01-01T00:00:00+00:00"
    [found] = PostgresTransitions("default").payloads("orders", [derived_id("orders", "PlaceOrder", ["0"])]).values()
    assert found == {"at": text, "list": [text], "map": {"a": text}, "s": {"at": text}}


def test_data_may_begin_with_white_space_and_a_problem_may_be_empty(spark: SparkSession, url: str) -> None:
    rows = frame(spark, 2, "'\n\t{}'").withColumn("problem", F.lit("")).withColumn("origin", F.lit("here"))
    assert count_rows(rows, all_right=True) == 2
    assert send(rows, url=url, domain="orders").sent == 2
    bad = rows.withColumn("problem", F.when(F.col("key") == "1", F.lit("so it is")))
    with pytest.raises(
        InvalidCommandError, match=r"one of them \(origin 'here', command_type 'PlaceOrder'\): so it is"
    ):
        count_rows(bad, all_right=True)


def test_a_stream_to_an_unknown_domain_is_an_error_at_once(spark: SparkSession, url: str, tmp_path: Any) -> None:
    stream = spark.readStream.format("rate").load().selectExpr("'T' AS command_type", "'x' AS key", "'{}' AS data")
    query = (
        stream.where("false")
        .writeStream.format("commandbus")
        .options(url=url, domain="paymnts", checkpointLocation=str(tmp_path / "c"))
    )
    with pytest.raises(PySparkException, match="domain 'paymnts' is not registered"):
        query.trigger(availableNow=True).start().awaitTermination()


def test_a_stream_cannot_be_atomic(spark: SparkSession, url: str, tmp_path: Any) -> None:
    stream = spark.readStream.format("rate").load().selectExpr("'T' AS command_type", "'x' AS key", "'{}' AS data")
    query = stream.writeStream.format("commandbus").options(
        url=url, domain="orders", atomic="true", checkpointLocation=str(tmp_path / "c")
    )
    with pytest.raises(PySparkException, match="the option atomic is not for streams"):
        query.trigger(once=True).start().awaitTermination()


def test_the_same_id_with_other_content_names_the_command(spark: SparkSession, url: str) -> None:
    command_id = uuid4()
    send_command("orders", "PlaceOrder", command_id, {"n": 1})
    df = spark.createDataFrame([("PlaceOrder", str(command_id), '{"n": 2}')], COLUMNS)
    with pytest.raises(
        InvalidCommandError, match=f"command_id '{command_id}', type 'PlaceOrder', cannot be sent: it was"
    ):
        send(df, url=url, domain="orders")
