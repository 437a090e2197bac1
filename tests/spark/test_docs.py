"""What docs/spark.md shows, run as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from commandbus import list_batches
from commandbus.models import Command, SparkJob
from tests.helpers import environment, unmeasured
from tests.scenarios.test_docs import DOCS, TOO_LONG, project, shell_blocks

__all__ = ["project"]  # a fixture

PAGE = "spark.md"


@pytest.mark.spark
def test_files_are_sent_from_the_shell(url: str, project: Path) -> None:
    blocks = shell_blocks(PAGE, "Send files")
    assert len(blocks) == 5
    variables = environment(
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", PYTHONPATH=str(DOCS.parent), DATABASE=url
    )
    done = subprocess.run(
        ["bash", "-euc", "\n".join(blocks)],
        cwd=project,
        env=unmeasured(variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=TOO_LONG,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [batch] = list_batches("payments")
    assert (batch.name, batch.total_count, batch.is_open) == ("Payouts of May", 3, False)
    counts = sorted(SparkJob.objects.values_list("sent_count", "duplicate_count", "rejected_count"))
    assert counts == [(0, 3, 0)] * 4 + [(1, 0, 1), (3, 0, 0)]
    assert '"data":"no JSON"' in done.stdout
    assert Command.objects.count() == 4


def test_dataframes_streams_and_rejects_are_as_documented(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    row = {"invoice": "2026-002", "account": "DE-1", "amount": "5.00"}
    (tmp_path / "in" / "a.json").write_text(json.dumps(row))
    monkeypatch.setenv("COMMANDBUS_URL", url)
    monkeypatch.setenv("PAYOUTS", str(tmp_path / "in"))
    monkeypatch.setenv("CHECKPOINT", str(tmp_path / "checkpoint"))
    blocks = re.findall(r"^```python\n(.*?)```", (DOCS / PAGE).read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, PAGE, "exec"), names)  # noqa: S102 - our own page
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("0 1 0 ")  # what the first block has sent is a duplicate to the second
    assert "its data cannot be read as JSON" in out
    assert Command.objects.count() == 2
    found = {batch.name: (batch.total_count, batch.is_open) for batch in list_batches("payments")}
    # What they would send was sent before, by the first block and by the other stream.
    assert found == {"Payouts of May": (0, False), "Payouts 0": (0, False)}
