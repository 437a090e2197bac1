"""The commands that the documentation shows, run as they stand there."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commandbus import list_batches
from commandbus.models import Command
from tests.helpers import BOTH, environment

pytestmark = pytest.mark.django_db(transaction=True, databases=BOTH)

DOCS = Path(__file__).resolve().parents[2] / "docs"
TOO_LONG = 300
"""Seconds until a script hangs: some of them start ten processes, beside other tests."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a manage.py, and a `python` that is this one."""
    (tmp_path / "manage.py").write_text(
        "import sys\nfrom django.core.management import execute_from_command_line\n"
        "if __name__ == '__main__':\n    execute_from_command_line(sys.argv)\n"
    )
    return tmp_path


def shell_blocks(page: str, heading: str) -> list[str]:
    section = (DOCS / page).read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^( *)```sh\n(.*?)```", section, re.DOTALL | re.MULTILINE)
    return [re.sub(f"^{indent}", "", block, flags=re.MULTILINE) for indent, block in blocks]


def run(project: Path, script: str, **changes: str) -> str:
    """On a terminal whose user says yes to every question."""
    master, terminal = pty.openpty()
    os.write(master, b"y\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    root = str(DOCS.parent)
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=project,
        env=environment(PATH=path, PYTHONPATH=root, **changes),
        stdin=terminal,
        capture_output=True,
        text=True,
        check=False,
        timeout=TOO_LONG,
    )
    os.close(terminal)
    os.close(master)
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def fail_them(project: Path) -> str:
    """Let the worker find out what is wrong with them; answers the id of one of them."""
    run(project, "python manage.py commandbus_worker payments --until-empty")
    command = Command.objects.filter(status="IN_TROUBLESHOOTING_QUEUE").last()
    assert command is not None
    return str(command.command_id)


def test_the_how_to_guides_of_the_shell_run(project: Path) -> None:
    for block in shell_blocks("how-to.md", "Send from a file"):
        run(project, block)
    assert Command.objects.count() == 3 + 2 + 1
    [block] = shell_blocks("how-to.md", "Work off the Troubleshooting Queue from the shell")
    run(project, block, ID=fail_them(project))
    assert set(Command.objects.filter(last_error_code="INVALID_DATA").values_list("status", flat=True)) == {
        *("PENDING", "CANCELED")
    }


def test_the_how_to_guide_of_batches_runs(project: Path) -> None:
    [block] = shell_blocks("how-to.md", "Work with batches from the shell")
    out = run(project, block)
    [batch] = list_batches("payments")
    assert str(batch.batch_id) in out
    assert (batch.status, batch.total_count) == ("COMPLETED_WITH_FAILURES", 2)
    [block] = shell_blocks("runbook.md", "When a batch does not end")
    assert "Payouts" in run(project, block, BATCH=str(batch.batch_id))


def test_the_runbook_of_a_full_troubleshooting_queue_runs(project: Path) -> None:
    send, *_ = shell_blocks("how-to.md", "Send from a file")
    run(project, send)
    troubled = fail_them(project)
    blocks = shell_blocks("runbook.md", "The Troubleshooting Queue is full of one error")
    assert len(blocks) == 3
    for block in blocks:
        run(project, block, ID=troubled)
    assert Command.objects.get(command_id=troubled).status == "PENDING"


def test_the_runbook_watches_with_a_command_that_there_is(project: Path) -> None:
    [block] = shell_blocks("runbook.md", "Watch")
    assert "--watch" in block
    assert "WAITING" in run(project, block.replace("--watch", ""))
