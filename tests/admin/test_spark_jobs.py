"""The list of Spark's jobs, and the page of one."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from html import unescape
from typing import Any
from urllib.parse import urlencode
from uuid import UUID, uuid4

import pytest
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.db import connection, connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from commandbus import search, send_command
from commandbus.admin import spark
from commandbus.models import Batch, SparkJob, SparkJobDelta, SparkReject
from commandbus.permissions import VIEWERS
from tests.admin.pages import client_of, get, text_of, url
from tests.helpers import BOTH, rows_read, unreachable
from tests.spark.test_functions import begin, call, close, row, write

pytestmark = pytest.mark.django_db(databases=BOTH)

LIST = "/admin/commandbus/sparkjob/"
BATCH = UUID("22222222-2222-4222-8222-222222222222")
NASTY = "<script>alert('x')</script>/a_b?c&d"


def job_page(job_id: str = "job", using: str = "default") -> str:
    return f"{url('sparkjob_change', quote(job_id))}?{urlencode({'database': using})}"


def listed(html: str) -> list[str]:
    return [unescape(name) for name in re.findall(r'field-job"><a href="[^"]*"><bdi>([^<]*)</bdi>', html)]


def onward(html: str) -> str:
    links = set(re.findall(r'<a href="(\?[^"]*beyond=[^"]*)">look at', html))
    assert len(links) <= 1
    return "".join(LIST + unescape(link) for link in links)


def started(job_id: str, at: datetime) -> None:
    SparkJob.objects.filter(job_id=job_id).update(started_at=at)


def some_jobs(count: int, domain: str = "orders") -> list[str]:
    """Oldest first."""
    names = [f"{domain} {number}" for number in range(count)]
    for name in names:
        call("open_spark_job", name, domain)
    return names


def data_of(html: str) -> list[str]:
    return [unescape(text) for text in re.findall(r'<pre class="cb-json">(.*?)</pre>', html, re.DOTALL)]


def test_the_list_shows_what_is_counted_now_newest_first(admin_client: Client) -> None:
    begin("first")
    write(row(uuid4()), job_id="first")
    close(1, job_id="first")
    begin("second", batch_id=BATCH)
    write(row(uuid4()), row(uuid4()), row("17"), job_id="second", reject=True)
    assert SparkJobDelta.objects.exists()
    assert SparkJob.objects.get(job_id="second").sent_count == 0
    html = get(admin_client, LIST)
    assert listed(html) == ["second", "first"]
    text = text_of(html)
    assert "2 sent – duplicate 1 rejected batch B" in text
    assert "1 sent 0 duplicate 0 rejected" in text
    assert re.search(r"second orders Running 3 rows so far, [\d,.]+ (a second|an hour)", text)
    assert re.search(r"running since [\d-]+ [\d:]+ .* so far", text)
    assert re.search(r"took \d", text)
    assert url("batch_change", f"orders/{BATCH}") in html
    assert " run " not in text


def test_the_counts_of_a_whole_page_are_read_in_one_query(admin_client: Client) -> None:
    some_jobs(12)
    with CaptureQueriesContext(connection) as many:
        assert len(listed(get(admin_client, LIST))) == 12
    assert len([query for query in many if "spark_job_now" in query["sql"]]) == 1
    with CaptureQueriesContext(connection) as few:
        get(admin_client, LIST, {"status": "FAILED"})
    assert len(few) <= len(many)


def test_every_filter_narrows_the_list(admin_client: Client) -> None:
    begin("running")
    begin("broken")
    call("fail_spark_job", "broken", 1, "oops")
    call("open_spark_job", "elsewhere", "other")
    assert listed(get(admin_client, LIST, {"domain": "other"})) == ["elsewhere"]
    assert listed(get(admin_client, LIST, {"status": "FAILED"})) == ["broken"]
    assert listed(get(admin_client, LIST, {"status": "RUNNING", "domain": "orders"})) == ["running"]
    assert listed(get(admin_client, LIST, {"status": "COMPLETED"})) == []
    assert listed(get(admin_client, LIST, {"o": "3"})) == ["running", "broken", "elsewhere"]


@pytest.mark.parametrize(
    "query", [{"status": "BOGUS"}, {"domain": "a\0b"}, {"beyond": "x"}, {"beyond": "9" * 18}, {"error": "x"}]
)
def test_what_cannot_be_meant_leads_to_the_whole_list(admin_client: Client, query: dict[str, str]) -> None:
    assert admin_client.get(LIST, query)["Location"] == f"{LIST}?e=1"


@pytest.mark.parametrize("order", [{}, {"o": "3"}])
def test_a_long_list_says_so_and_leads_on(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch, order: dict[str, str]
) -> None:
    monkeypatch.setattr(search, "AT_MOST", 3)
    names = some_jobs(5)[:: 1 if order else -1]
    html = get(admin_client, LIST, order)
    assert listed(html) == names[:3]
    assert "There are more" in text_of(html)
    html = get(admin_client, onward(html))
    assert listed(html) == names[3:]
    assert "There is nothing" in text_of(html)


def test_jobs_of_the_same_moment_are_not_lost_between_two_looks(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "AT_MOST", 3)
    names = some_jobs(5)
    for name in names[1:4]:
        started(name, SparkJob.objects.get(job_id=names[2]).started_at)
    seen: list[str] = []
    page = LIST
    while page:
        html = get(admin_client, page)
        seen += listed(html)
        page = onward(html)
    assert set(seen) == set(names)


def test_a_filter_looks_through_a_bounded_number_of_jobs(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "LOOK_THROUGH", 2)
    monkeypatch.setattr(search, "AT_MOST", 1)
    call("open_spark_job", "rare", "other")
    names = some_jobs(2)
    html = get(admin_client, LIST, {"domain": "other"})
    assert listed(html) == []
    assert "Nothing of what was looked through matches, but not all was" in text_of(html)
    assert listed(get(admin_client, onward(html))) == ["rare"]
    assert listed(get(admin_client, LIST, {"domain": "orders"})) == [names[1]]


def test_jobs_on_another_database_are_shown_from_there(admin_client: Client) -> None:
    begin("here")
    with connections["second"].cursor() as cursor:
        cursor.execute("SELECT commandbus.open_spark_job('there', 'archive')")
        cursor.execute("SELECT * FROM commandbus.spark_send('there', 1, '{17}', '{Keep}', '{\"{}\"}', reject => true)")
    assert listed(get(admin_client, LIST)) == ["here"]
    for query in ({"database": "second"}, {"domain": "archive"}):
        html = get(admin_client, LIST, query)
        assert listed(html) == ["there"]
        assert "1 rejected" in text_of(html)
        [link] = re.findall(r'field-job"><a href="([^"]*)"', html)
        assert "in database second" in get(admin_client, unescape(link))
    text = text_of(get(admin_client, job_page("there", "second")))
    assert "in database second" in text
    assert "&#x27;17&#x27; is not a UUID" in text
    assert admin_client.get(job_page("there")).status_code == 404


@pytest.mark.django_db(transaction=True, databases=BOTH)
def test_a_list_of_a_database_that_is_away_leads_back_and_says_so(admin_client: Client) -> None:
    with unreachable("second"):
        response = admin_client.get(LIST, {"database": "second"}, follow=True)
        assert "The database second gave no answer" in response.content.decode()
        connections["second"].close()


def test_the_page_of_a_job_that_runs_shows_what_is_not_folded_yet(admin_client: Client) -> None:
    begin()
    write(row(uuid4()), row(uuid4()), row("17"), reject=True)
    started("job", timezone.now() - timedelta(seconds=100))
    text = text_of(get(admin_client, job_page()))
    assert "job Running" in text
    assert "Rows 3 so far 0.03 a second" in text
    assert "Sent 2 " in text
    assert "Duplicate counted when it ends" in text
    assert "Rejected 1 were set aside" in text
    assert "Sends a DataFrame " in text
    assert "Batch none" in text
    assert "Has taken 1 min 40 s" in text
    assert "Ended" not in text
    assert "failed" not in text.split("Home", 1)[1].lower()


def test_the_page_of_a_job_that_has_ended_shows_all_that_is_known(admin_client: Client) -> None:
    known, mine = send_command("orders", "Ship", uuid4(), {"n": 1}), uuid4()
    begin(batch_id=BATCH)
    write(row(mine), row(known), row("17"), reject=True)
    assert begin(batch_id=BATCH) == 2
    write(row(mine), row(uuid4()), row(known), row("17"), run=2, reject=True)
    close(4, 1, run=2)
    html = get(admin_client, job_page())
    text = text_of(html)
    assert "job Completed" in text
    assert "Rows 4 " in text
    assert "so far" not in text
    assert "Sent 2 1 of them by earlier runs" in text
    assert "Duplicate 1 were sent before, or stand there twice" in text
    assert "Rejected 1 were set aside" in text
    assert "1 of 1, in no particular order" in text
    assert "Run 2 first begun" in text
    assert re.search(r"Ended [\d-]+ [\d:]+ Took \d+", text)
    assert f'<a href="{url("batch_change", f"orders/{BATCH}")}"><bdi>B</bdi></a>' in html
    assert "run 2" in text_of(get(admin_client, LIST))
    Batch.objects.all().delete()
    text = text_of(get(admin_client, job_page()))
    assert f"Batch {BATCH} was pruned" in text


def test_a_job_that_failed_says_why_and_what_it_has_set_aside(admin_client: Client) -> None:
    begin()
    write(row(uuid4()), row("17"), reject=True)
    call("fail_spark_job", "job", 1, "<b>disk</b> is full\nat row 3")
    html = get(admin_client, job_page())
    assert '<pre class="cb-text">&lt;b&gt;disk&lt;/b&gt; is full\nat row 3</pre>' in html
    text = text_of(html)
    assert "job Failed" in text
    assert "Rows not counted" in text
    assert "Sent 1 " in text
    assert "Duplicate not counted" in text
    assert "Rejected 1 were set aside" in text
    assert "1 sent – duplicate 1 rejected" in text_of(get(admin_client, LIST))


def test_an_error_is_masked(admin_client: Client) -> None:
    begin()
    call("fail_spark_job", "job", 1, '{"password": "s3cr3t", "why": "refused"}')
    html = get(admin_client, job_page())
    assert "s3cr3t" not in html
    assert "refused" in html


def test_an_atomic_job_sends_when_it_ends(admin_client: Client) -> None:
    begin(atomic=True)
    write(row(uuid4()))
    text = text_of(get(admin_client, job_page()))
    assert "Sends a DataFrame, all of it or nothing" in text
    assert "Sent 0 all are sent when it ends" in text
    assert "1 row so far" in text_of(get(admin_client, LIST))


def test_a_stream_says_so_and_its_last_micro_batch(admin_client: Client) -> None:
    call("open_spark_stream", "flow", "orders", "query")
    write(row(uuid4()), job_id="flow", stream=("r1", 0))
    assert "Last micro-batch none yet" in text_of(get(admin_client, job_page("flow")))
    assert "flow orders Running stream 1 row so far" in text_of(get(admin_client, LIST))
    call("close_spark_stream_batch", "flow", "r1", 0, 1)
    write(row(uuid4()), row("17"), job_id="flow", stream=("r1", 1), reject=True)
    text = text_of(get(admin_client, job_page("flow")))
    assert "Sends a stream" in text
    assert re.search(r"Last micro-batch 0 at \d{4}-.{,40} of the run r1", text)
    assert "Rows 3 so far with those" in text
    assert "Sent 2 " in text
    assert "Duplicate 0 " in text
    assert "Rejected 1 " in text
    text = text_of(get(admin_client, LIST))
    assert "Running stream, micro-batch 0 3 rows so far" in text
    assert "2 sent 0 duplicate 1 rejected" in text


def test_rows_that_were_set_aside_are_masked_and_what_is_not_json_is_not_shown(admin_client: Client) -> None:
    secret = {"password": "s3cr3t", "inner": [{"API_KEY": "s3cr3t", "text": '{"token": "s3cr3t"}'}], "amount": 17}
    broken = '{"password": "s3cr3t", '
    bad: list[Any] = [
        row("1", json.dumps(secret)),
        row("2", broken),
        row("3", "password=s3cr3t"),
        row("4", None),
        row("5", "[" * 20_000),
        row("6", kind='{"secret": "s3cr3t'),
    ]
    begin()
    assert len(write(*bad, reject=True)) == len(bad)
    html = get(admin_client, job_page())
    assert "s3cr3t" not in html
    text = text_of(html)
    assert f"not JSON, {len(broken)} characters" in text
    assert "not JSON, 15 characters" in text
    assert "not JSON, 20,000 characters" in text
    [shown] = [data for data in data_of(html) if "amount" in data]
    assert json.loads(shown)["password"] == "••••••"
    assert json.loads(shown)["amount"] == 17
    assert "none" in text.split("in no particular order")[1]


def test_a_row_with_half_a_surrogate_pair_is_shown(admin_client: Client) -> None:
    begin()
    write(row(uuid4(), '{"a": "\\ud800", "b": "\\u0000"}'), reject=True)
    [shown] = data_of(get(admin_client, job_page()))
    assert json.loads(shown) == {"a": "?", "b": "\0"}


def test_long_texts_are_cut(admin_client: Client) -> None:
    begin()
    long = json.dumps({"a": "x" * 40_000})
    huge = json.dumps({"a": "x" * 60_000})
    write(row("y" * 10_000, long, "z" * 10_000), row("2", huge), reject=True)
    html = get(admin_client, job_page())
    assert len(html) < 40_000
    assert "[cut: 40013 characters]" in html
    assert f"{len(huge):,} bytes, too many to be shown" in text_of(html)


def test_only_some_of_many_rows_are_shown_and_counted(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    begin()
    write(*(row(str(number)) for number in range(60)), reject=True)
    html = get(admin_client, job_page())
    assert len(data_of(html)) == 50
    assert "50 of 60, in no particular order" in text_of(html)
    monkeypatch.setattr(spark, "MOST_COUNTED", 55)
    assert "50 of 55+, in no particular order" in text_of(get(admin_client, job_page()))
    assert "55+ rejected" in text_of(get(admin_client, LIST))
    close(60, 60)
    assert "60 rejected" in text_of(get(admin_client, LIST))


def test_with_many_jobs_and_rows_a_bounded_number_is_read(admin_client: Client) -> None:
    begin("big")
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO command_bus_spark_job (job_id, domain, status, run, started_at) SELECT 'job ' || n, 'orders',"
            " 'RUNNING', 1, now() - n * interval '1 second' FROM generate_series(1, 20000) AS n"
        )
        cursor.execute(
            "INSERT INTO command_bus_spark_reject (job_id, run, digest, reason, rejected_at)"
            " SELECT CASE WHEN n % 100 = 0 THEN 'job 1' ELSE 'big' END, 1, sha256(n::text::bytea), 'bad', now()"
            " FROM generate_series(1, 50000) AS n"
        )
        cursor.execute("ANALYZE command_bus_spark_job, command_bus_spark_reject")
    before = rows_read("command_bus_spark_job"), rows_read("command_bus_spark_reject")
    text = text_of(get(admin_client, LIST))
    assert "1,000+ rejected" in text
    assert "500 rejected" in text
    assert rows_read("command_bus_spark_job") - before[0] < 6_000
    get(admin_client, job_page("big"))
    assert rows_read("command_bus_spark_reject") - before[1] < 4_000


def test_whatever_somebody_wrote_is_escaped(admin_client: Client) -> None:
    begin(NASTY)
    write(row(NASTY, json.dumps({NASTY: NASTY}), NASTY), job_id=NASTY, reject=True)
    SparkReject.objects.update(reason=NASTY)
    html = get(admin_client, LIST)
    assert listed(html) == [NASTY]
    assert "<script>alert" not in html
    [link] = re.findall(r'field-job"><a href="([^"]*)"', html)
    html = get(admin_client, unescape(link))
    assert "<script>alert" not in html
    assert html.count("&lt;script&gt;alert") >= 6
    call("fail_spark_job", NASTY, 1, NASTY)
    call("open_spark_stream", "flow", "orders", "query")
    call("close_spark_stream_batch", "flow", NASTY, 0, 0)
    for name in (NASTY, "flow"):
        html = get(admin_client, job_page(name))
        assert "<script>alert" not in html
        assert "&lt;script&gt;alert" in html


@pytest.mark.parametrize("name", ["a/b", "a_2Fb", "job/change", "50% off", "ä ö", "..x", 'say "hi"', "line\nbreak"])
def test_every_job_id_has_its_page(admin_client: Client, name: str) -> None:
    begin(name)
    [link] = re.findall(r'field-job"><a href="([^"]*)"', get(admin_client, LIST))
    assert "Spark job" in get(admin_client, unescape(link))


def test_there_is_no_page_of_what_is_not_there(admin_client: Client) -> None:
    for missing in ("nothing", "a%00b"):
        assert admin_client.get(f"{LIST}{missing}/change/").status_code == 404, missing


def test_nothing_can_be_added_changed_or_deleted(admin_client: Client) -> None:
    begin()
    assert admin_client.get(url("sparkjob_add")).status_code == 403
    assert admin_client.post(job_page(), {"status": "COMPLETED"}).status_code == 403
    assert admin_client.post(url("sparkjob_delete", "job"), {"post": "yes"}).status_code == 403
    assert admin_client.post(LIST, {"action": "delete_selected", "_selected_action": "job"}).status_code in (302, 403)
    assert SparkJob.objects.get().status == "RUNNING"


def test_a_viewer_may_look_and_a_stranger_may_not() -> None:
    begin()
    viewer, stranger, one = client_of(VIEWERS, "victor"), client_of(None, "sam"), client_of(None, "nina")
    User.objects.get(username="nina").user_permissions.add(Permission.objects.get(codename="view_sparkjob"))
    User.objects.get(username="sam").user_permissions.add(Permission.objects.get(codename="view_batch"))
    for page in (LIST, job_page(), url("sparkjob_history", "job")):
        assert viewer.get(page).status_code == 200
        assert one.get(page).status_code == 200
        assert stranger.get(page).status_code == 403
    assert "Spark jobs" in get(viewer, "/admin/")
