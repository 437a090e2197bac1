"""As a data engineer calls it: from the shell, on a cluster, killed half-way, without a Java."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from commandbus import get_batch
from commandbus.models import Command, SparkJob
from tests.helpers import environment
from tests.scenarios.test_docs import TOO_LONG, shell_blocks
from tests.spark_cluster.cluster import HOSTS, Cluster
from tests.spark_cluster.test_faults import frame, sent, until

MANY = 20_000
ROOT = Path(__file__).resolve().parents[2]
MANAGE = (
    "import sys\nfrom django.core.management import execute_from_command_line\nexecute_from_command_line(sys.argv)\n"
)
LOCAL = [f"spark.driver.host={HOSTS[0]}", f"spark.driver.bindAddress={HOSTS[0]}", "spark.ui.enabled=false"]


def options(*pairs: str) -> list[str]:
    return [argument for pair in pairs for argument in ("--conf", pair)]


@pytest.fixture
def payouts(spark: SparkSession, tmp_path: Path) -> str:
    frame(spark, MANY).withColumnRenamed("key", "invoice").drop("data").write.parquet(str(tmp_path / "payouts"))
    return str(tmp_path / "payouts")


def test_a_job_that_is_killed_half_way_is_completed_by_the_same_command(url: str, payouts: str) -> None:
    command = [
        *(sys.executable, "-m", "django", "commandbus_spark", "send", "--domain", "orders", payouts),
        *("--format", "parquet", "--id-from", "invoice", "--batch", "Payouts", "--job-id", "payouts"),
        *("--on-complete-type", "Summarize"),
        *("--chunk-rows", "100", "--master", "local[1]", *options(*LOCAL)),
    ]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, start_new_session=True) as first:
        try:
            until(lambda: sent() > 2000 or first.poll() is not None, "a part of the commands")
        finally:
            os.killpg(first.pid, signal.SIGKILL)
        _, told = first.communicate()
    assert 2000 < sent() < MANY, told.decode()
    second = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=TOO_LONG)
    assert second.returncode == 0, second.stderr
    lines = [line.split() for line in second.stdout.splitlines()]
    assert lines[0] == ["sent", f"{MANY:,}"]
    assert lines[2:4] == [["duplicate", "0"], ["rejected", "0"]]
    job = SparkJob.objects.get()
    assert (job.run, job.sent_count, Command.objects.count()) == (2, MANY, MANY)
    assert job.batch_id is not None
    batch = get_batch("orders", job.batch_id)
    assert batch is not None
    assert (batch.total_count, batch.is_open) == (MANY, False)


@pytest.mark.parametrize("phase", ["starts", "sends"])
def test_ctrl_c_ends_it_in_one_line_and_leaves_nothing_running(url: str, payouts: str, phase: str) -> None:
    command = [
        *(sys.executable, "-m", "django", "commandbus_spark", "send", "--domain", "orders", payouts),
        *(
            "--format",
            "parquet",
            "--id-from",
            "invoice",
            "--chunk-rows",
            "20",
            "--master",
            "local[1]",
            *options(*LOCAL),
        ),
    ]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            if phase == "starts":
                until(lambda: len(members(process.pid)) > 1 or process.poll() is not None, "a Java")
            else:
                until(lambda: sent() > 100 or process.poll() is not None, "a part of the commands")
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            out, told = process.communicate(timeout=TOO_LONG)
            until(lambda: members(process.pid) == [], "the end of all that it has started")
        finally:
            if members(process.pid):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, out + told
    assert "Traceback" not in told
    assert "\tat " not in told
    last = told.rstrip().splitlines()[-1]
    if phase == "starts":
        assert last == "interrupted; nothing was sent"
    else:
        assert last.startswith("interrupted; what was sent stays, and the same command again goes on (job send-")
        assert 100 < sent() < MANY


def members(group: int) -> list[int]:
    """Processes that a terminal would interrupt together with their first one, and which still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(words[2]) == group and words[0] != "Z":
                found.append(int(entry.name))
    return found


def test_the_documentation_of_a_cluster_runs(url: str, machines: Cluster, tmp_path: Path) -> None:
    (tmp_path / "payouts.csv").write_text("invoice,account,amount\n1,DE-1,10\n2,DE-1,20\n")
    (tmp_path / "manage.py").write_text(MANAGE)
    by_project, by_submit = shell_blocks("spark.md", "On a cluster")
    changes = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MASTER": machines.master,
        "DATABASE": url,
    }
    # With a project: the executors get the package as a zip, and have nothing else of it.
    done = _run(by_project, tmp_path, environment(**changes, PYSPARK_PYTHON=machines.python()))
    assert ["sent", "2"] in [line.split() for line in done.splitlines()], done
    # Without one: neither has the driver.
    SparkJob.objects.all().delete()
    python = machines.python()
    home = str(Path(pyspark.__file__).parent)
    alone = {**changes, "PYTHONPATH": "", "PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python, "SPARK_HOME": home}
    done = _run(by_submit, tmp_path, {**os.environ, **alone})
    assert ["duplicate", "2"] in [line.split() for line in done.splitlines()], done
    assert Command.objects.count() == 2


def _run(script: str, folder: Path, variables: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=TOO_LONG,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_machine_without_java_uses_the_one_from_pypi(url: str, tmp_path: Path) -> None:
    tools = tmp_path / "bin"  # all that the system has, but no java
    tools.mkdir()
    for folder in ("/usr/local/bin", "/usr/bin", "/bin"):
        for tool in Path(folder).iterdir():
            if not tool.name.startswith("java") and not (tools / tool.name).exists():
                (tools / tool.name).symlink_to(tool)
    csv = tmp_path / "a.csv"
    csv.write_text("invoice\n1\n")
    command: list[str | Path] = [
        *(sys.executable, "-m", "commandbus.spark", "send", csv, "--domain", "orders", "--type", "PlaceOrder"),
        *("--id-from", "invoice", "--master", "local[1]", *options(*LOCAL)),
    ]
    hidden = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    done = subprocess.run(
        command,
        env={**hidden, "PATH": str(tools), "COMMANDBUS_URL": url},
        capture_output=True,
        text=True,
        check=False,
        timeout=TOO_LONG,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert Command.objects.count() == 1
