"""The SQL functions that a job writes through, without Spark: what is sent, what is refused, what is set aside."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from django.db import connection, transaction
from psycopg import sql
from psycopg.types.json import Jsonb

from commandbus import get_batch, send_command
from commandbus.models import Command, Domain, SparkJob, SparkJobDelta, SparkReject, SparkStaged
from tests.helpers import WAITING_SESSIONS, libpq_parameters, wait_until
from tests.test_prune import complete, prune

pytestmark = pytest.mark.django_db

Row = tuple[Any, ...]
BATCH = UUID("11111111-1111-4111-8111-111111111111")


def call(function: str, *arguments: Any) -> list[Row]:
    with connection.cursor() as cursor:
        marks = sql.SQL(", ").join([sql.Placeholder()] * len(arguments))
        name = sql.Identifier("commandbus", function)
        cursor.execute(sql.SQL("SELECT * FROM {}({})").format(name, marks), arguments)
        return list(cursor.fetchall())


def begin(job_id: str = "job", *, atomic: bool = False, batch_id: UUID | None = None, **batch: Any) -> int:
    on_complete = batch.get("on_complete")
    name = "B" if batch_id else None
    callback = None if on_complete is None else Jsonb(on_complete)
    [(run,)] = call("open_spark_job", job_id, "orders", atomic, batch_id, name, None, callback)
    return int(run)


def row(command_id: object, data: str | None = '{"n": 1}', kind: str | None = "Ship") -> Row:
    return (None if command_id is None else str(command_id), kind, data)


def write(*rows: Row, job_id: str = "job", run: int = 1, reject: bool = False, stream: Row = (None, None)) -> list[Row]:
    columns = [list(column) for column in zip(*rows, strict=True)]
    reply_to, correlation_ids, delays = (columns[3:] + [None] * 3)[:3]
    arguments = (job_id, run, *columns[:3], reply_to, correlation_ids, delays, None, reject, *stream)
    return sorted(call("spark_send", *arguments))


def close(rows: int, rejected: int = 0, *, job_id: str = "job", run: int = 1, reject: bool = False) -> dict[str, Any]:
    [(now,)] = call("close_spark_job", job_id, run, rows, rejected, reject)
    job = json.loads(now)
    assert isinstance(job, dict)
    return job


def counts(job: dict[str, Any]) -> tuple[int, int, int]:
    return job["sent_count"], job["duplicate_count"], job["rejected_count"]


def refused(match: str) -> Any:
    return pytest.raises(Exception, match=match)


def test_rows_are_sent_once_and_counted() -> None:
    ids = [uuid4() for _ in range(3)]
    begin()
    assert write(row(ids[0]), row(ids[1])) == []
    assert write(row(ids[1]), row(ids[2])) == []
    assert counts(close(3)) == (3, 0, 0)
    assert set(Command.objects.values_list("command_id", flat=True)) == set(ids)


def test_what_others_have_sent_is_a_duplicate() -> None:
    command_id = send_command("orders", "Ship", uuid4(), {"n": 1})
    begin()
    assert write(row(command_id), row(uuid4())) == []
    assert counts(close(2)) == (1, 1, 0)


def test_what_was_sent_outside_of_its_batch_is_a_duplicate_that_the_batch_does_not_count() -> None:
    known = send_command("orders", "Ship", uuid4(), {"n": 1})
    begin(batch_id=BATCH)
    assert write(row(known), row(uuid4())) == []
    assert counts(close(2)) == (1, 1, 0)
    batch = get_batch("orders", BATCH)
    assert batch is not None
    assert (batch.total_count, batch.is_open) == (1, False)


def test_a_pruned_command_is_a_duplicate_also_for_a_batch() -> None:
    command_id = uuid4()
    complete(command_id)
    assert prune() == 1
    begin(batch_id=BATCH)
    assert write(row(command_id), row(uuid4())) == []
    assert counts(close(2)) == (1, 1, 0)


def test_the_same_job_goes_on_where_it_was() -> None:
    ids = [uuid4() for _ in range(4)]
    begin(batch_id=BATCH)
    write(row(ids[0]), row(ids[1]))
    assert begin(batch_id=BATCH) == 2
    write(*map(row, ids), run=2)
    job = close(4, run=2)
    assert counts(job) == (4, 0, 0)
    assert job["sent_before"] == 2
    batch = get_batch("orders", BATCH)
    assert batch is not None
    assert batch.total_count == 4


def test_a_job_that_has_completed_can_be_repeated() -> None:
    ids = [uuid4(), uuid4()]
    begin(batch_id=BATCH)
    write(*map(row, ids))
    close(2)
    run = begin(batch_id=BATCH)
    write(*map(row, ids), run=run)
    assert counts(close(2, run=run)) == (2, 0, 0)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (row(None), "it has no command_id"),
        (row("17"), "'17' is not a UUID"),
        (row(uuid4(), kind=None), "it has no command_type"),
        (row(uuid4(), kind=""), "its command_type has 0 characters"),
        (row(uuid4(), kind="x" * 256), "its command_type has 256 characters"),
        (row(uuid4(), None), "it has no data"),
        (row(uuid4(), "{"), "its data cannot be read as JSON"),
        (row(uuid4(), '{"a": "\\u0000"}'), "its data cannot be read as JSON"),
        (row(uuid4(), "[" * 100_000), "its data cannot be read as JSON"),
        (row(uuid4(), "[1]"), "its data must be a JSON object, not array"),
        (row(uuid4(), json.dumps({"a": "x" * 2_000_000})), "its data take 2000009 bytes; the domain allows 1048576"),
        ((*row(uuid4()), "nowhere__replies", None, None), "there is no reply queue 'nowhere__replies'"),
        ((*row(uuid4()), None, "x", None), "'x' is not a UUID"),
        ((*row(uuid4()), None, None, -1.0), "its delay is -1"),
        ((*row(uuid4()), None, None, float("nan")), "its delay is NaN"),
    ],
)
def test_a_bad_row_is_named_and_nothing_of_the_call_is_sent_or_it_is_set_aside(bad: Row, why: str) -> None:
    good = row(uuid4())
    if len(bad) > 3:
        good = (*good, None, None, None)
    begin()
    [(number, problem)] = write(good, bad)
    assert (number, problem.startswith(why)) == (2, True), problem
    assert not Command.objects.exists()
    assert not SparkReject.objects.exists()

    [(number, _)] = write(good, bad, reject=True)
    write(bad, reject=True)
    assert counts(close(2, 1)) == (1, 0, 1)
    aside = SparkReject.objects.get()
    assert (aside.command_id, aside.command_type, aside.data) == bad[:3]
    assert aside.reason.startswith(why)


def test_the_same_id_with_other_content_is_a_problem_of_the_later_one() -> None:
    known, twice = send_command("orders", "Ship", uuid4(), {"n": 0}), uuid4()
    begin()
    problems = write(row(known), row(twice), row(twice), row(twice, '{"n": 2}'), reject=True)
    assert [number for number, _ in problems] == [1, 4]
    assert problems[0][1].startswith("it was sent before with another type or other data")
    assert problems[1][1].startswith("another row has its command_id, with another type or other data; is what")
    assert counts(close(4, 2)) == (1, 1, 2)


def test_ids_are_unique_in_all_domains_where_the_project_wants_that() -> None:
    Domain.objects.update(unique_globally=True)
    elsewhere = send_command("other", "Ship", uuid4(), {"n": 1})
    begin()
    assert write(row(elsewhere)) == [(1, "its command_id was sent to domain other before")]


def test_what_a_run_writes_after_its_end_is_refused() -> None:
    begin()
    write(row(uuid4()))
    close(1)
    with refused("job 'job' has ended"):
        write(row(uuid4()))


def test_what_an_earlier_run_still_writes_is_refused() -> None:
    begin()
    begin()
    with refused("job 'job' was begun again at"):
        write(row(uuid4()))


def test_an_earlier_run_cannot_end_the_job() -> None:
    begin()
    begin()
    with refused("job 'job' was begun again at"):
        close(1)


def test_to_close_it_again_answers_the_same() -> None:
    begin()
    write(row(uuid4()))
    assert close(1) == close(1)


def test_a_failed_job_keeps_what_it_has_sent_and_can_be_begun_again() -> None:
    begin(batch_id=BATCH)
    write(row(uuid4()))
    assert call("fail_spark_job", "job", 1, "oops") == [(True,)]
    assert call("fail_spark_job", "job", 1, "again") == [(False,)]
    job = SparkJob.objects.get()
    assert (job.status, job.error, job.sent_count) == ("FAILED", "oops", 1)
    batch = get_batch("orders", BATCH)
    assert batch is not None
    assert batch.is_open
    assert begin(batch_id=BATCH) == 2


def test_why_it_has_failed_is_said_by_who_knows() -> None:
    """What a task has met counts only if the driver knows nothing: another attempt of the task may have done well."""
    for error, told in (("some rows are lost", "some rows are lost"), (None, "no disk")):
        run = begin()
        call("note_spark_error", "job", run, "no disk")
        call("fail_spark_job", "job", run, error)
        assert SparkJob.objects.get().error == told
    call("fail_spark_job", "job", begin(), None)
    assert SparkJob.objects.get().error == "Spark has given up: its own log says why"


def test_a_failed_run_cannot_be_closed() -> None:
    begin()
    call("fail_spark_job", "job", 1, "oops")
    with refused("job 'job' has failed: oops"):
        close(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("job", "other", False, None), "there is a job 'job' already: it sends to domain 'orders'"),
        (("job", "orders", False, BATCH), "there is a job 'job' already: it has no batch"),
        (("", "orders", False, None), "there cannot be a job ''"),
        (("job2", "nowhere", False, None), "domain 'nowhere' is not registered"),
    ],
)
def test_another_job_under_the_same_id_is_refused(arguments: Row, message: str) -> None:
    begin()
    with refused(message):
        call("open_spark_job", *arguments)


def test_an_atomic_job_sends_all_or_nothing() -> None:
    begin(atomic=True, batch_id=BATCH)
    ids = [uuid4() for _ in range(2500)]
    write(*map(row, ids[:2000]))
    write(*map(row, ids[1000:]))
    assert not Command.objects.exists()
    assert counts(close(2500)) == (2500, 0, 0)
    assert Command.objects.filter(batch_id=BATCH).count() == 2500
    assert not SparkStaged.objects.exists()


def test_an_atomic_job_that_meets_a_conflict_at_its_end_sends_nothing() -> None:
    begin(atomic=True)
    ids = [uuid4(), uuid4()]
    write(*map(row, ids))
    send_command("orders", "Ship", ids[0], {"n": 2})
    with refused(f"command {ids[0]} of type 'Ship' cannot be sent: it was sent before"), transaction.atomic():
        close(2)
    assert [command.command_id for command in Command.objects.all()] == [ids[0]]
    assert SparkStaged.objects.count() == 2


def test_an_atomic_job_sets_a_conflict_at_its_end_aside_if_it_shall() -> None:
    begin(atomic=True)
    ids = [uuid4(), uuid4()]
    write(*map(row, ids))
    send_command("orders", "Ship", ids[0], {"n": 2})
    assert counts(close(2, reject=True)) == (1, 0, 1)


def test_rows_of_an_atomic_job_that_contradict_each_other_are_found() -> None:
    begin(atomic=True)
    command_id = uuid4()
    assert write(row(command_id)) == []
    assert write(row(command_id)) == []
    assert write(row(command_id, '{"n": 2}')) == [
        (1, "another row has its command_id, with another type or other data; is what the id follows from unique?")
    ]
    assert write(row(None)) == [(1, "it has no command_id")]


def test_a_refused_call_of_an_atomic_job_keeps_nothing() -> None:
    begin(atomic=True)
    command_id = uuid4()
    write(row(command_id))
    assert write(row(uuid4()), row(command_id, '{"n": 2}')) == [
        (2, "another row has its command_id, with another type or other data; is what the id follows from unique?")
    ]
    assert SparkStaged.objects.count() == 1
    assert not SparkReject.objects.exists()
    assert len(write(row(uuid4()), row(command_id, '{"n": 2}'), reject=True)) == 1
    assert (SparkStaged.objects.count(), SparkReject.objects.count()) == (2, 1)


def test_rows_that_are_the_same_and_cannot_be_sent_are_all_counted_as_rejected() -> None:
    begin()
    assert len(write(*[row(None)] * 5, row(uuid4()), reject=True)) == 5
    assert counts(close(6, 5)) == (1, 0, 5)
    assert SparkReject.objects.count() == 1


def test_an_atomic_job_that_is_begun_again_or_fails_forgets_what_it_kept() -> None:
    begin(atomic=True)
    write(row(uuid4()))
    begin(atomic=True)
    assert not SparkStaged.objects.exists()
    write(row(uuid4()), run=2)
    call("fail_spark_job", "job", 2, "oops")
    assert not SparkStaged.objects.exists()


def test_a_stream_refuses_late_attempts_of_a_micro_batch_but_not_after_a_restart() -> None:
    for _ in range(2):
        call("open_spark_stream", "stream", "orders", "query")
    ids = [uuid4(), uuid4()]
    write(row(ids[0]), job_id="stream", stream=("r1", 0))
    call("close_spark_stream_batch", "stream", "r1", 0, 1)
    with refused("micro-batch 0 of job 'stream' has ended"), transaction.atomic():
        write(row(ids[0]), job_id="stream", stream=("r1", 0))
    write(row(ids[1]), job_id="stream", stream=("r1", 1))
    write(row(ids[0]), job_id="stream", stream=("r2", 0))
    for _ in range(2):
        call("close_spark_stream_batch", "stream", "r2", 0, 1)
    job = SparkJob.objects.get()
    assert (job.row_count, job.sent_count, job.stream_run) == (1, 2, "r2")
    write(row(ids[1]), row(ids[1]), row(None), job_id="stream", stream=("r2", 1), reject=True)
    for _ in range(2):
        call("close_spark_stream_batch", "stream", "r2", 1, 3, 1)
    job.refresh_from_db()
    assert (job.row_count, job.sent_count, job.duplicate_count, job.rejected_count) == (4, 2, 1, 1)


def test_a_stream_is_no_dataframe() -> None:
    call("open_spark_stream", "stream", "orders", "query")
    with refused("it sends a stream, and not a DataFrame"), transaction.atomic():
        begin("stream")
    begin("frame")
    with refused("it sends a DataFrame, and not a stream"):
        call("open_spark_stream", "frame", "orders", "query")


def test_two_queries_are_two_jobs() -> None:
    """They count their micro-batches alike, and one would take those of the other for its own."""
    call("open_spark_stream", "stream", "orders", "query")
    with refused("there is a job 'stream' already: it sends another query"):
        call("open_spark_stream", "stream", "orders", "another")


def test_rows_that_postgresql_has_lost_after_it_had_confirmed_them_are_missed() -> None:
    """A standby has taken over that was behind, for example. Such rows are no duplicates."""
    ids = [uuid4() for _ in range(4)]
    begin()
    write(*map(row, ids[:2]))
    SparkJobDelta.objects.all().delete()
    Command.objects.all().delete()
    write(*map(row, ids[2:]))
    with refused("4 rows were written for job 'job', and PostgreSQL has only 2 of them"), transaction.atomic():
        close(4)
    assert SparkJob.objects.get().status == "RUNNING"
    begin()
    write(*map(row, ids), run=2)
    assert counts(close(4, run=2)) == (4, 0, 0)
    call("open_spark_stream", "stream", "orders", "query")
    with refused("1 rows were written for job 'stream', and PostgreSQL has only 0 of them"):
        call("close_spark_stream_batch", "stream", "r1", 0, 1)


@pytest.mark.parametrize(("usual", "here"), [("off", "on"), ("local", "local")])
def test_what_spark_is_told_is_on_disk(usual: str, here: str) -> None:
    begin()
    for step in (lambda: write(row(uuid4())), lambda: close(1)):
        with connection.cursor() as cursor:
            cursor.execute("SELECT set_config('synchronous_commit', %s, true)", [usual])
            step()
            cursor.execute("SELECT current_setting('synchronous_commit')")
            assert cursor.fetchone() == (here,)


def test_half_a_surrogate_pair_is_called_by_its_name() -> None:
    begin()
    [(_, why)] = write(row(uuid4(), r'{"a": "\ud800"}'))
    assert why.startswith("its data cannot be read as JSON: invalid input syntax for type json: Unicode ")


def test_progress_shows_what_is_not_folded_yet() -> None:
    begin()
    write(row(uuid4()), row(uuid4()))
    [(now,)] = call("spark_job_now", "job")
    job = json.loads(now)
    assert (job["sent_count"], job["handled_rows"]) == (2, 2)
    assert SparkJob.objects.get().sent_count == 0
    assert call("spark_job_now", "other") == [(None,)]
    close(2)
    assert not SparkJobDelta.objects.exists()


def test_old_jobs_are_pruned_with_what_they_set_aside() -> None:
    begin("old")
    write(row(None), job_id="old", reject=True)
    close(1, job_id="old")
    begin("killed", atomic=True)
    write(row(uuid4()), job_id="killed")
    call("open_spark_stream", "silent stream", "orders", "query")
    assert call("prune_spark_jobs", "orders", datetime.now(UTC) - timedelta(days=1), 10) == [(0,)]
    assert SparkReject.objects.exists()
    later = datetime.now(UTC) + timedelta(days=1)
    assert call("prune_spark_jobs", "orders", later, 2) == [(2,)]
    assert call("prune_spark_jobs", "orders", later, 2) == [(1,)]
    assert not SparkJob.objects.exists()
    assert not SparkReject.objects.exists()
    assert not SparkStaged.objects.exists()
    assert not SparkJobDelta.objects.exists()


def test_a_thousand_jobs_are_pruned_at_the_most_for_each_takes_a_lock() -> None:
    domain = Domain.objects.get(name="orders").name
    SparkJob.objects.bulk_create(
        SparkJob(job_id=f"job {number}", domain=domain, status="COMPLETED", run=1) for number in range(1100)
    )
    later = datetime.now(UTC) + timedelta(days=1)
    assert call("prune_spark_jobs", "orders", later, 5000) == [(1000,)]
    assert call("prune_spark_jobs", "orders", later, 5000) == [(100,)]


def test_a_stream_that_goes_on_is_kept_but_not_what_it_set_aside_long_ago() -> None:
    yesterday, long_ago = (datetime.now(UTC) - timedelta(days=days) for days in (1, 2))
    call("open_spark_stream", "stream", "orders", "query")
    SparkJob.objects.update(started_at=long_ago)
    for number in range(2):
        write(row(None, f'{{"n": {number}}}'), job_id="stream", reject=True, stream=("run", number))
        call("close_spark_stream_batch", "stream", "run", number, 1, 1)
    first = SparkReject.objects.filter(data='{"n": 0}')
    first.update(rejected_at=long_ago)
    assert call("prune_spark_jobs", "orders", yesterday, 10) == [(0,)]
    assert SparkJob.objects.get().stream_batch == 1
    assert SparkReject.objects.get().data == '{"n": 1}'


@pytest.mark.django_db(transaction=True)
def test_the_end_of_a_job_waits_for_those_who_write_and_lets_nobody_pass() -> None:
    """A late attempt that writes chunk after chunk must not keep the end of the job waiting for ever."""
    begin()
    chunk = "SELECT * FROM commandbus.spark_send('job', 1, ARRAY[%s], ARRAY['Ship'], ARRAY['{}'])"

    def end() -> dict[str, Any]:
        with psycopg.connect(**libpq_parameters(), autocommit=True) as other:
            [(now,)] = other.execute("SELECT commandbus.close_spark_job('job', 1, 1)").fetchall()
            assert isinstance(now, dict)
            return now

    def late() -> str:
        with psycopg.connect(**libpq_parameters(), autocommit=True) as other, pytest.raises(psycopg.Error) as caught:
            other.execute(chunk, [str(uuid4())])
        return str(caught.value)

    def waiting() -> int:
        with connection.cursor() as cursor:
            cursor.execute(WAITING_SESSIONS)
            return int(cursor.fetchone()[0])

    with psycopg.connect(**libpq_parameters()) as writer, ThreadPoolExecutor() as pool:
        writer.execute(chunk, [str(uuid4())])
        ending = pool.submit(end)
        wait_until(lambda: waiting() == 1, "the end that waits")
        passing = pool.submit(late)
        wait_until(lambda: waiting() == 2, "the late attempt that waits behind it")
        writer.commit()
        assert counts(ending.result()) == (1, 0, 0)
        assert "has ended (COMPLETED)" in passing.result()


def test_what_a_run_set_aside_is_there_until_two_later_ones_have_completed() -> None:
    """The next one may have been given a part of it only, with corrections."""

    def kept() -> list[int]:
        return sorted(SparkReject.objects.values_list("run", flat=True))

    begin()
    write(row(None), row("17"), reject=True)
    close(2, 2)
    begin()
    write(row(None), row(uuid4()), run=2, reject=True)
    assert kept() == [1, 1, 2]
    assert counts(close(2, 1, run=2)) == (1, 0, 1)
    assert kept() == [1, 1, 2]
    begin()
    call("fail_spark_job", "job", 3, "oops")
    begin()
    assert kept() == [1, 1, 2]
    close(0, run=4)
    assert kept() == [2]


def test_large_rows_of_an_atomic_job_are_released_a_few_at_a_time() -> None:
    begin(atomic=True)
    large = json.dumps({"text": "x" * 1_000_000})
    assert write(*[row(uuid4(), large) for _ in range(10)]) == []
    before = SparkJobDelta.objects.create(job_id="another", row_count=0, sent_count=0).id
    assert counts(close(10)) == (10, 0, 0)
    after = SparkJobDelta.objects.create(job_id="another", row_count=0, sent_count=0).id
    assert after - before == 3  # five of them reach the bound of 4 MiB, and so do the others


@pytest.mark.django_db(transaction=True)
def test_an_atomic_job_wakes_one_worker_at_its_end_and_makes_no_subtransactions() -> None:
    begin(atomic=True)
    write(*[row(uuid4()) for _ in range(3000)])
    with psycopg.connect(**libpq_parameters()) as other:
        nodes = [uuid4(), uuid4(), uuid4()]
        for node in nodes:
            other.execute("SELECT commandbus.set_idle(ARRAY['orders'], %s)", [node])
        other.commit()
        other.execute("SELECT commandbus.close_spark_job('job', 1, 3000)")
        [(waiting,)] = other.execute("SELECT count(*) FROM command_bus_idle_worker").fetchall()
        [(subtransactions,)] = other.execute(
            "SELECT subxact_count FROM pg_stat_get_backend_subxact((SELECT pg_stat_get_backend_idset FROM"
            " pg_stat_get_backend_idset() WHERE pg_stat_get_backend_pid(pg_stat_get_backend_idset) = pg_backend_pid()))"
        ).fetchall()
        other.commit()
    assert waiting == 2
    assert subtransactions == 0
    assert Command.objects.count() == 3000


@pytest.mark.django_db(transaction=True)
def test_two_who_send_the_same_ids_in_opposite_order_do_not_deadlock() -> None:
    for name in ("a", "b"):
        begin(name)
    ids = [str(uuid4()) for _ in range(12_000)]
    together = Barrier(2)

    def send(job_id: str, step: int) -> None:
        """The same three thousand at the same time, from the one end or from the other."""
        with psycopg.connect(**libpq_parameters(), autocommit=True) as other:
            for start in range(0, len(ids), 3000):
                part = sorted(ids[start : start + 3000])[::step]
                together.wait(30)
                other.execute(
                    "SELECT * FROM commandbus.spark_send(%s, 1, %s, array_fill('Ship'::text, ARRAY[3000]),"
                    " array_fill('{}'::text, ARRAY[3000]))",
                    [job_id, part],
                )

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(send, "a", 1), pool.submit(send, "b", -1)]:
            done.result()
    sent = [close(12_000, job_id=name)["sent_count"] for name in ("a", "b")]
    assert sum(sent) == 12_000
    assert Command.objects.count() == 12_000
