"""What a task and the driver do with a job, without Spark's own processes: the writer is called as Spark calls it."""

from __future__ import annotations

import decimal
import json
import pickle
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from commandbus import (
    ConfigurationError,
    InvalidCommandError,
    UnknownDomainError,
    get_batch,
    get_command,
)
from commandbus.exceptions import BatchRefusedError, SparkJobRefusedError, UnreachableError
from commandbus.ids import derived_id
from commandbus.models import Command, SparkJob, SparkReject
from commandbus.spark.connection import Session, own_error, parameters_of, resolved
from commandbus.spark.options import WriteOptions, batch_id_of
from commandbus.spark.rows import Rows, check_columns
from commandbus.spark.writer import CommandWriter
from commandbus.transitions import PostgresTransitions
from tests.helpers import libpq_parameters, running_worker, wait_until

KINDS: dict[str, DataType] = {
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "double": DoubleType(),
    "decimal": DecimalType(10, 2),
    "array<string>": ArrayType(StringType()),
    "array<int>": ArrayType(IntegerType()),
    "map<int, int>": MapType(IntegerType(), IntegerType()),
    "struct<a: date>": StructType([StructField("a", DateType())]),
    "struct<a: string, b: bigint>": StructType([StructField("a", StringType()), StructField("b", LongType())]),
}
SCHEMA = "command_type string, command_id string, data string"


def schema_of(text: str) -> StructType:
    """As StructType.fromDDL, which needs a Java."""
    fields = re.findall(r"(\w+) (\w+<.*?>|\w+)(?:, |$)", text)
    assert ", ".join(" ".join(field) for field in fields) == text
    return StructType([StructField(name, KINDS[kind]) for name, kind in fields])


def row(n: int, **changes: Any) -> dict[str, Any]:
    return {"command_type": "PlaceOrder", "command_id": str(UUID(int=n + 1)), "data": f'{{"n": {n}}}', **changes}


def batches(rows: list[dict[str, Any]], size: int = 3) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(rows), size):
        yield pa.RecordBatch.from_pylist(rows[start : start + size])


def writer(url: str, schema: str = SCHEMA, **options: str) -> CommandWriter:
    wanted = WriteOptions.of({"url": url, "domain": "orders", "jobId": "job", "chunkRows": "2", **options})
    made = CommandWriter(wanted, schema_of(schema))
    copy = pickle.loads(pickle.dumps(made))  # noqa: S301 - our own, as it gets to the executors
    assert isinstance(copy, CommandWriter)
    return copy


def payloads() -> list[Any]:
    ids = list(Command.objects.order_by("id").values_list("command_id", flat=True))
    found = PostgresTransitions("default").payloads("orders", ids)
    return [found[command_id] for command_id in ids]


def test_a_job_sends_its_rows_in_chunks_and_counts_them(url: str) -> None:
    job = writer(url)
    messages = [job.write(batches([row(n) for n in range(5)])), job.write(batches([row(n) for n in range(5, 8)]))]
    job.commit([*messages, None])
    found = SparkJob.objects.get()
    assert (found.status, found.row_count, found.sent_count, found.duplicate_count) == ("COMPLETED", 8, 8, 0)
    assert payloads() == [{"n": n} for n in range(8)]


def test_a_task_that_failed_and_is_tried_again_sends_nothing_twice(url: str) -> None:
    job = writer(url)

    def breaking() -> Iterator[pa.RecordBatch]:
        yield from batches([row(0), row(1), row(2)])
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        job.write(breaking())
    assert Command.objects.count() == 3
    job.commit([job.write(batches([row(n) for n in range(5)]))])
    found = SparkJob.objects.get()
    assert (found.sent_count, found.duplicate_count, Command.objects.count()) == (5, 0, 5)


def test_an_attempt_that_is_late_writes_nothing(url: str) -> None:
    job = writer(url)
    job.commit([job.write(batches([row(0)]))])
    with pytest.raises(SparkJobRefusedError, match="job 'job' has ended"):
        job.write(batches([row(1)]))
    assert Command.objects.count() == 1


def test_the_run_before_writes_nothing_once_the_job_is_begun_again(url: str) -> None:
    before = writer(url)
    writer(url)
    with pytest.raises(SparkJobRefusedError, match="was begun again"):
        before.write(batches([row(1)]))


def test_a_job_that_was_killed_goes_on_with_its_batch(url: str) -> None:
    options = {"batchName": "Payouts", "onCompleteType": "Summarize", "onCompleteData": '{"to": "x"}'}
    writer(url, **options).write(batches([row(n) for n in range(4)]))
    again = writer(url, **options)
    again.commit([again.write(batches([row(n) for n in range(9)]))])
    found = SparkJob.objects.get()
    assert (found.run, found.sent_count, found.sent_before, found.duplicate_count) == (2, 9, 4, 0)
    batch = get_batch("orders", batch_id_of("orders", "job"))
    assert batch is not None
    assert (batch.total_count, batch.is_open, batch.name) == (9, False, "Payouts")


def test_a_job_that_has_completed_takes_no_more_into_its_batch(url: str) -> None:
    job = writer(url, batchName="Payouts")
    job.commit([job.write(batches([row(0)]))])
    again = writer(url, batchName="Payouts")
    with pytest.raises(BatchRefusedError, match="takes no more commands: it was sealed"):
        again.write(batches([row(1)]))


def test_the_end_of_the_batch_is_a_command(url: str) -> None:
    job = writer(url, batchName="Payouts", onCompleteType="PlaceOrder", onCompleteData='{"sku": "end"}')
    job.commit([job.write(batches([row(n, data='{"sku": "a"}') for n in range(3)]))])
    with running_worker():
        wait_until(lambda: Command.objects.filter(batch_id__isnull=True, status="COMPLETED").count() == 1, "its end")
    batch = get_batch("orders", batch_id_of("orders", "job"))
    assert batch is not None
    assert (batch.completed_count, batch.callback_sent_at is not None) == (3, True)


def test_rows_that_cannot_be_sent_stop_the_job_by_name(url: str) -> None:
    job = writer(url)
    with pytest.raises(InvalidCommandError) as caught:
        job.write(batches([row(0), row(1), row(2), row(3, data="{"), row(4, data="[")]))
    assert str(caught.value) == (
        f"row 4, command_id '{UUID(int=4)}', type 'PlaceOrder', cannot be sent: its data cannot be read as JSON: "
        "invalid input syntax for type json (so do 1 more near it); correct it and run the job again, or set such "
        "rows aside with the option onInvalid=reject (in the shell: --rejects FOLDER)"
    )
    assert Command.objects.count() == 3
    job.abort([None])
    assert SparkJob.objects.get().status == "FAILED"
    again = writer(url)
    again.commit([again.write(batches([row(n) for n in range(5)]))])
    assert (SparkJob.objects.get().status, Command.objects.count()) == ("COMPLETED", 5)


def test_rows_that_cannot_be_sent_are_set_aside_if_they_shall(url: str) -> None:
    job = writer(url, onInvalid="reject")
    bad = [row(1, data="{"), row(2, data="\x00"), row(3, command_type=None)]
    job.commit([job.write(batches([row(0), *bad]))])
    found = SparkJob.objects.get()
    assert (found.sent_count, found.rejected_count) == (1, 3)
    assert set(SparkReject.objects.values_list("data", flat=True)) == {"{", "\\u0000", '{"n": 3}'}


def test_an_atomic_job_shows_nothing_before_its_end(url: str) -> None:
    job = writer(url, atomic="true")
    message = job.write(batches([row(n) for n in range(5)]))
    assert not Command.objects.exists()
    job.commit([message])
    assert Command.objects.count() == 5


def test_a_lost_connection_is_opened_again_and_nothing_is_sent_twice(url: str) -> None:
    job = writer(url)

    def cut_off() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches([row(n) for n in range(12)])):
            if number in (1, 3):
                with psycopg.connect(**libpq_parameters(), autocommit=True) as other:
                    other.execute(
                        "SELECT pg_terminate_backend(pid, 3000) FROM pg_stat_activity"
                        " WHERE application_name = 'commandbus spark job' AND datname = current_database()"
                    )
            yield batch

    job.commit([job.write(cut_off())])
    assert (SparkJob.objects.get().sent_count, Command.objects.count()) == (12, 12)


def test_a_statement_that_was_committed_before_the_connection_was_lost_is_repeated_without_harm(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = writer(url)
    execute = Session._execute
    lost: list[int] = []

    def lose_the_answer(self: Session, query: str, arguments: Any, however_long: bool) -> Any:
        answer = execute(self, query, arguments, however_long)
        if "spark_send" in query and not lost:
            lost.append(1)
            raise psycopg.OperationalError("the connection is lost")
        return answer

    monkeypatch.setattr(Session, "_execute", lose_the_answer)
    job.commit([job.write(batches([row(0), row(1)]))])
    found = SparkJob.objects.get()
    assert (found.sent_count, found.duplicate_count, Command.objects.count()) == (2, 0, 2)


@contextmanager
def short_statements() -> Iterator[None]:
    """New sessions may have these only, and meanwhile somebody takes long to let go of the job."""
    with psycopg.connect(**libpq_parameters(), autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        limits = ["statement_timeout", *(["transaction_timeout"] if connection.info.server_version >= 170000 else [])]
        for limit in map(sql.Identifier, limits):
            connection.execute(sql.SQL("ALTER DATABASE {} SET {} = '100ms'").format(name, limit))
        hold = "SELECT pg_advisory_xact_lock_shared(commandbus.spark_job_key('job')), pg_sleep(1)"
        try:
            with ThreadPoolExecutor() as pool:
                pool.submit(connection.execute, hold)
                wait_until(_is_held, "the one who holds it")
                yield
                assert not _is_held()  # so it was waited for
        finally:
            for limit in map(sql.Identifier, limits):
                connection.execute(sql.SQL("ALTER DATABASE {} RESET {}").format(name, limit))


def _is_held() -> bool:
    with psycopg.connect(**libpq_parameters(), autocommit=True, options="-c statement_timeout=0") as other:
        query = (
            "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database AND datname = current_database()"
            " WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted"
        )
        return other.execute(query).fetchone() == (1,)


def test_a_database_that_allows_only_short_statements_is_no_obstacle(url: str) -> None:
    """Neither to begin a job, nor to end it: an atomic one may have millions of rows to remove or to send then."""
    with short_statements():
        job = writer(url, atomic="true")
    job.write(batches([row(n) for n in range(3)]))
    with short_statements():
        job.abort([])
    assert SparkJob.objects.get().status == "FAILED"
    job = writer(url, atomic="true")
    message = job.write(batches([row(n) for n in range(3)]))
    with short_statements():
        job.commit([message])
    assert Command.objects.count() == 3


def test_a_database_that_stays_away_ends_the_task_after_some_patience(url: str) -> None:
    with (
        Session({"host": "/nowhere", "dbname": "x"}, patience=0.3) as session,
        pytest.raises(UnreachableError, match="PostgreSQL cannot be reached"),
    ):
        session.call("SELECT 1", [])


def test_what_only_postgresql_refuses_is_an_error_at_once(url: str) -> None:
    with Session(parameters_of(url), patience=60) as session, pytest.raises(Exception, match="division by zero"):
        session.call("SELECT 1/0", [])


def test_a_database_without_commandbus_is_named(url: str) -> None:
    with (
        Session({**parameters_of(url), "dbname": "postgres"}, patience=0) as session,
        pytest.raises(ConfigurationError, match="the database has no commandbus, or an older one"),
    ):
        session.call("SELECT commandbus.spark_job_now('x')", [])


@pytest.mark.parametrize(
    "bad",
    [
        "postgresql://u:hunter2@h:notaport/db",
        "postgresql//u:hunter2@h/db",
        "jdbc:postgresql://u:hunter2@h/db",
        "postgresql://u:hunter2@/db?host=/nowhere",
        "postgresql://postgres:/hunter2@db/prod",
        "host=127.0.0.1;password=hunter2;dbname=d",
        "postgresql://u@h.invalid;password=hunter2/d",
        "host=/nowhere user=u;password=hunter2",
        "host=/nowhere dbname=d;password=hunter2",
        "host=/nowhere sslmode=require;password=hunter2",
    ],
)
def test_no_error_repeats_a_password(bad: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolved(bad)
    assert "hunter2" not in f"{caught.value!r} {caught.value.__cause__!r}"


def test_a_pickled_writer_shows_no_password(url: str) -> None:
    job = writer(f"{url}&password=hunter2")
    assert "hunter2" not in repr(job) + repr(job.__dict__)


def test_the_password_of_the_driver_travels_to_the_executors(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    assert resolved(url)["password"] == "hunter2"


def test_who_vanishes_in_a_long_transaction_keeps_its_locks_for_a_minute(url: str) -> None:
    """A machine that has lost its power says nothing; all others would wait for it."""
    with Session(parameters_of(url), patience=0) as session:
        query = "SELECT current_setting('idle_in_transaction_session_timeout')"
        assert session.call(query, [], however_long=True) == [("1min",)]


def test_a_statement_that_takes_too_long_is_named_with_a_remedy(url: str) -> None:
    with (
        Session(parameters_of(f"{url}&options=-c%20statement_timeout%3D50ms"), patience=0) as session,
        pytest.raises(
            Exception, match=r"canceling statement due to statement timeout; if that was the .*\(chunkRows\)"
        ),
    ):
        session.call("SELECT pg_sleep(5)", [])


def test_postgresqls_own_errors_keep_their_state() -> None:
    assert "SQLSTATE None" in str(own_error(psycopg.DataError("no")))


def test_an_unknown_domain_is_named_before_anything_is_read(url: str) -> None:
    with pytest.raises(UnknownDomainError, match="domain 'paymnts' is not registered; known: "):
        writer(url, domain="paymnts")


def test_ids_follow_from_keys(url: str) -> None:
    job = writer(url, "key struct<a: string, b: bigint>, data string", commandType="PlaceOrder")
    rows = [{"key": {"a": "DE-1", "b": n}, "data": "{}"} for n in range(2)]
    job.commit([job.write(batches(rows))])
    assert {c.command_id for c in Command.objects.all()} == {
        derived_id("orders", "PlaceOrder", ["DE-1", n]) for n in range(2)
    }


def test_a_key_that_is_null_is_no_id(url: str) -> None:
    job = writer(url, "command_type string, key array<string>, data string")
    rows = [{"command_type": "PlaceOrder", "key": ["a", None], "data": "{}"}]
    with pytest.raises(InvalidCommandError, match="its key is empty, or a part of it null"):
        job.write(batches(rows))


def test_what_a_row_says_of_reply_correlation_and_delay_is_kept(url: str) -> None:
    schema = f"{SCHEMA}, reply_to string, correlation_id string, delay decimal"
    correlation = str(uuid4())
    job = writer(url, schema)
    job.commit(
        [
            job.write(
                batches(
                    [
                        row(0, reply_to="other.replies", correlation_id=correlation, delay=decimal.Decimal("60.00")),
                        row(1, reply_to=None, correlation_id=None, delay=None),
                    ]
                )
            )
        ]
    )
    command = get_command("orders", UUID(int=1))
    assert command is not None
    assert (command.reply_queue, str(command.correlation_id)) == ("other__replies", correlation)
    received = PostgresTransitions("default").receive("orders", qty=10, vt=30)
    assert [one.command.command_id for one in received] == [UUID(int=2)]


def test_data_become_json_that_does_not_depend_on_the_session(url: str) -> None:
    at = datetime(2026, 1, 31, 8, 30, tzinfo=timezone(timedelta(hours=2)))
    data = {
        "text": 'ü"\n',
        "whole": 2**62,
        "yes": True,
        "half": 0.5,
        "money": decimal.Decimal("10.00"),
        "at": at,
        "local": datetime(2026, 1, 31, 8, 30),  # noqa: DTZ001 - Spark's timestamp_ntz
        "day": date(2026, 1, 31),
        "bytes": b"\x00\xff",
        "nothing": None,
        "list": [1, None],
        "inner": {"a": "b"},
    }
    kinds = pa.struct(
        [
            *[pa.field(n, pa.infer_type([data[n]])) for n in ("text", "whole", "yes", "half", "money")],
            pa.field("at", pa.timestamp("us", tz="America/New_York")),
            *[pa.field(n, pa.infer_type([data[n]])) for n in list(data)[6:]],
            pa.field("map", pa.map_(pa.string(), pa.int32())),
        ]
    )
    column = pa.array([{**data, "map": [("k", 1)]}], kinds)
    batch = pa.RecordBatch.from_arrays(
        [pa.array(["PlaceOrder"]), pa.array([str(UUID(int=1))]), column], ["command_type", "command_id", "data"]
    )
    [chunk] = Rows("orders", None, 100).chunks(batch)
    [text] = chunk.data
    assert text == (
        '{"text":"ü\\"\\n","whole":4611686018427387904,"yes":true,"half":0.5,"money":10.00,'
        f'"at":"{at.astimezone(UTC).isoformat()}","local":"2026-01-31T08:30:00","day":"2026-01-31","bytes":"AP8=",'
        '"nothing":null,"list":[1,null],"inner":{"a":"b"},"map":{"k":1}}'
    )


def test_a_number_of_32_bits_has_the_digits_that_it_was_written_with() -> None:
    values = [{"a": value} for value in (0.1, 16777216.0, 3.4028235e38, 1.1754944e-38)]
    column = pa.array(values, pa.struct([pa.field("a", pa.float32())]))
    ids = pa.array([str(UUID(int=n + 1)) for n in range(4)])
    batch = pa.RecordBatch.from_arrays([pa.array(["T"] * 4), ids, column], ["command_type", "command_id", "data"])
    [chunk] = Rows("orders", None, 100).chunks(batch)
    assert chunk.data[0] == '{"a":0.1}'
    assert [json.loads(text or "")["a"] for text in chunk.data[1:3]] == [16777216.0, 3.4028235e38]


def test_a_value_that_python_cannot_hold_is_a_problem_of_its_row() -> None:
    far = pa.array([2**58, 0], pa.timestamp("us"))
    column = pa.StructArray.from_arrays([far], ["at"])
    ids = pa.array([str(UUID(int=n + 1)) for n in range(2)])
    batch = pa.RecordBatch.from_arrays([pa.array(["T"] * 2), ids, column], ["command_type", "command_id", "data"])
    [chunk] = Rows("orders", None, 100).chunks(batch)
    assert chunk.problems is not None
    assert str(chunk.problems[0]).startswith("it holds a value that cannot be read")
    assert (chunk.problems[1], chunk.data[1]) == (None, '{"at":"1970-01-01T00:00:00"}')


def test_a_key_without_parts_is_no_id() -> None:
    batch = pa.RecordBatch.from_pylist([{"command_type": "T", "key": [], "data": "{}", "problem": "\x00"}])
    [chunk] = Rows("orders", None, 100).chunks(batch.cast(pa.schema([*batch.schema])))
    assert chunk.command_ids == [None]


def test_a_number_that_json_cannot_hold_is_a_problem_of_its_row() -> None:
    batch = pa.RecordBatch.from_pylist([row(0, data={"a": float("nan")}), row(1, data={"a": 1.0})])
    [chunk] = Rows("orders", None, 100).chunks(batch)
    assert chunk.problems == ["data.a is nan, which JSON cannot hold; use a number, null or text", None]


def test_large_rows_make_small_chunks() -> None:
    batch = pa.RecordBatch.from_pylist([row(n, data="x" * 1_000_000) for n in range(10)])
    assert max(len(chunk) for chunk in Rows("orders", None, 100).chunks(batch)) <= 4


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("command_id string, data string", "there is no column command_type"),
        ("command_type string, data string", "there must be either a column command_id, or a column key"),
        ("command_type string, command_id string", "there is no column data"),
        (f"{SCHEMA}, amount int", "there is a column 'amount'"),
        (f"{SCHEMA}, DATA string", "there is a column 'DATA'"),
        ("command_type int, command_id string, data string", "the column command_type has the type int"),
        ("command_type string, command_id bigint, data string", "the column command_id has the type bigint"),
        ("command_type string, key double, data string", "the column key has the type double"),
        ("command_type string, key struct<a: date>, data string", "the column key has the type struct<a:date>"),
        ("command_type string, key string, data array<int>", "the column data has the type array<int>"),
        ("command_type string, key string, data map<int, int>", "the column data has the type map<int,int>"),
        (f"{SCHEMA}, delay string", "the column delay has the type string; it must be a number of seconds"),
    ],
)
def test_wrong_columns_are_named_before_anything_is_read(schema: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_columns(schema_of(schema), None)
    assert str(caught.value).startswith(message)


def test_a_type_is_given_once() -> None:
    with pytest.raises(ConfigurationError, match="both a column command_type and the option commandType"):
        check_columns(schema_of(SCHEMA), "PlaceOrder")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": ""}, 'the option url is missing; add .option("url", '),
        ({"domain": ""}, "the option domain is missing"),
        ({"onInvalid": "ignore"}, "the option onInvalid must be fail or reject, not 'ignore'"),
        ({"atomic": "yes"}, "the option atomic must be true or false, not 'yes'"),
        ({"chunkRows": "0"}, "the option chunkRows must be a number from 1 to 100,000, not '0'"),
        ({"retrySeconds": "soon"}, "the option retrySeconds must be 0 to 86,400 seconds, not 'soon'"),
        ({"jobID2": "x"}, "there is no option 'jobID2'; did you mean jobId? the options are url, domain, jobId"),
        ({"customData": "{}"}, "the option customData needs a batch; add the option batchName"),
        ({"batchName": "b", "customData": "["}, "the option customData is not JSON"),
        ({"batchName": "b", "customData": "[]"}, "the option customData must be a JSON object"),
        ({"batchName": "b", "onCompleteData": "{}"}, "the option onCompleteData needs the option onCompleteType"),
    ],
)
def test_wrong_options_are_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        WriteOptions.of({"url": "postgresql://h/d", "domain": "orders", "jobId": "job", **changes})
    assert str(caught.value).startswith(message)


def test_a_stream_has_no_batch_and_no_end() -> None:
    given = {"url": "postgresql://h/d", "domain": "orders"}
    for name in ("atomic", "batchName"):
        with pytest.raises(ConfigurationError, match=f"the option {name} is not for streams"):
            WriteOptions.of({**given, name: "true"}, is_stream=True)


def test_what_spark_adds_is_no_mistake() -> None:
    assert WriteOptions.of({"url": "postgresql://h/d", "DOMAIN": "orders", "path": "x"}).domain == "orders"
