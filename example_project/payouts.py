"""A file of payouts, which the demo lets Spark send as one batch."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path
from typing import Any
from uuid import UUID

from commandbus import Status
from commandbus.models import Batch, Command

ROWS = 200
NAME = "Payouts from a CSV file, by Spark"
QUERY = """
    SELECT 'DebitAccount' AS command_type, invoice AS key, struct(account, amount) AS data, correlation_id FROM input
"""


class DemoFailedError(Exception):
    """What happened does not add up; the message says where."""


def arguments(folder: Path, run_id: UUID) -> list[str]:
    """Of the command that sends the file; writes the file. `run_id`: what all commands of the demo have in common."""
    path = folder / f"payouts-{run_id}.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["invoice", "account", "amount", "correlation_id"])
        writer.writerows((f"{run_id}/{number}", "DE-1", "0.10", run_id) for number in range(ROWS))
    return [
        *("commandbus_spark", "send", "--domain", "payments", str(path), "--sql", QUERY),
        *("--job-id", f"payouts-{run_id}", "--batch", NAME, "--on-complete-type", "SendSummary"),
        *("--master", "local[1]", "--conf", "spark.ui.enabled=false", "--conf", "spark.driver.memory=512m"),
    ]


def summaries(run_id: UUID) -> list[dict[str, Any]]:
    """What was answered by the command that Spark's batch has sent when it had completed."""
    batches = Command.objects.filter(domain="payments", correlation_id=run_id, batch_id__isnull=False)
    found = Batch.objects.filter(batch_id__in=batches.values("batch_id"))
    ids = [batch.on_complete["command_id"] for batch in found if batch.on_complete]
    commands = Command.objects.filter(domain="payments", command_id__in=ids, status=Status.COMPLETED)
    return [command.reply["data"] for command in commands if command.reply is not None]


class Payouts:
    """The process that runs this command."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self._log = folder / "spark.log"

    def ended(self) -> str | None:
        """What became of the file, once that is known. Raises DemoFailedError."""
        if self._process.poll() is None:
            return None
        log = self._log.read_text(errors="replace")
        counts = [line.split() for line in log.splitlines()]
        if self._process.returncode or ["sent", str(ROWS)] not in counts:
            raise DemoFailedError(f"Spark has not sent the file of payouts; its log is {self._log}: {log[-2000:]}")
        return f'Spark has sent {ROWS} commands from a CSV file, as the batch "{NAME}".'
