"""What jobs keep and set aside comes and goes, so that PostgreSQL often counts on nothing being there.

See tests/test_plans.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from uuid import uuid4

import pytest

from commandbus.models import SparkReject, SparkStaged
from tests.plans import BELIEFS, believing, reading
from tests.spark.test_functions import begin, call, close, row, write

pytestmark = pytest.mark.django_db

TABLES = ("command_bus_spark_staged", "command_bus_spark_reject")
CHUNK, CHUNKS = 1000, 12


@pytest.fixture(params=BELIEFS)
def others(request: pytest.FixtureRequest) -> Iterator[None]:
    """What other jobs have kept and set aside."""
    with believing(request.param, _keep, TABLES):
        _keep()
        yield


def _keep() -> None:
    for job_id in ("other 1", "other 2"):
        run = begin(job_id, atomic=True)
        bad = [row(f"{job_id} {number}") for number in range(2000)]
        assert len(write(*bad, *[row(uuid4()) for _ in range(2000)], job_id=job_id, run=run, reject=True)) == 2000


def test_what_an_atomic_job_has_kept_is_read_once(others: None) -> None:
    begin(atomic=True)
    for _ in range(CHUNKS):
        assert write(*[row(uuid4()) for _ in range(CHUNK)]) == []
    kept = CHUNKS * CHUNK
    with reading(TABLES) as read:
        assert close(kept)["sent_count"] == kept
    assert not SparkStaged.objects.filter(job_id="job").exists()
    assert read["command_bus_spark_staged"] < 3 * kept


def test_a_prune_reads_no_rejects_but_those_of_its_jobs(others: None) -> None:
    begin()
    write(*[row(f"{number}") for number in range(10)], reject=True)
    close(10, 10)
    call("open_spark_stream", "stream", "orders", "query")
    write(*[row(f"{number}") for number in range(10)], job_id="stream", reject=True, stream=("run", 1))
    SparkReject.objects.filter(job_id="stream").update(rejected_at=datetime(2020, 1, 1, tzinfo=UTC))
    with reading(TABLES) as read:
        assert call("prune_spark_jobs", "orders", datetime(2021, 1, 1, tzinfo=UTC), 10) == [(0,)]
    assert not SparkReject.objects.filter(job_id="stream").exists()
    assert read["command_bus_spark_reject"] < 60
