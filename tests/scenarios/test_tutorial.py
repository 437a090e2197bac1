"""docs/tutorial.md, word by word: its files are those of the example, and its commands run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.helpers import wait_until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "example_project"
KEY = "5b1b1d6e-8f0e-4a83-9d6c-2f0a3a1c7e55"


@dataclass(frozen=True)
class Block:
    introduction: str
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file of the application that it shows."""
        found = re.match(r"`(payments/[\w/.]+)`", self.introduction)
        return found[1] if found else None


def blocks() -> list[Block]:
    """The fenced blocks, each with the paragraph before it."""
    text = (ROOT / "docs" / "tutorial.md").read_text()
    parts = re.split(r"^```(\w+)\n(.*?)^```\n", text, flags=re.DOTALL | re.MULTILINE)
    return [
        Block(before.strip().split("\n\n")[-1], language, code)
        for before, language, code in zip(parts[::3], parts[1::3], parts[2::3], strict=False)
    ]


def test_the_files_of_the_tutorial_are_those_of_the_example() -> None:
    shown = {block.file: block.text for block in blocks() if block.file}
    assert len(shown) == 8
    for name, text in shown.items():
        assert text == (EXAMPLE / str(name)).read_text(), f"docs/tutorial.md and example_project/{name} differ"


class Follower:
    """Somebody who follows the tutorial in a folder, with a web server on a port that is free here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DJANGO")}
        (folder / "bin").mkdir()
        if shutil.which("curl") is None:
            (folder / "bin" / "curl").write_text(CURL)
            (folder / "bin" / "curl").chmod(0o755)
        self.environment = {**clean, "PATH": f"{Path(sys.executable).parent}:{folder / 'bin'}:{clean['PATH']}"}
        self.background: list[subprocess.Popen[bytes]] = []

    def follow(self, block: Block) -> None:
        if block.file:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif "manage.py" in block.introduction and block.language == "python":
            before = "    execute_from_command_line(sys.argv)"
            self.change("manage.py", before, f"{block.text}{before}")
        elif block.language == "python":
            [name] = re.findall(r"the end of `([\w/.]+)`", block.introduction)
            path = self.folder / name
            path.write_text(path.read_text() + block.text)
        else:
            self.run(block.text)

    def change(self, name: str, before: str, after: str) -> None:
        path = self.folder / name
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))

    def run(self, commands: str) -> None:
        if commands.startswith("python3 -m venv"):
            return  # the tests' own environment; test_wheel.py installs the package
        commands = commands.replace("runserver", f"runserver --noreload {self.port}").replace(":8000", f":{self.port}")
        if "runserver" in commands or "commandbus_worker" in commands:
            words = ["bash", "-c", f"exec {commands}"]
            with (self.folder / f"log-{len(self.background)}").open("wb") as log:
                self.background.append(
                    subprocess.Popen(words, cwd=self.folder, env=self.environment, stdout=log, stderr=log)
                )
            if "runserver" in commands:
                wait_until(lambda: self.page("") is not None, "the web server")
            return
        done = subprocess.run(
            ["bash", "-ec", commands],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, commands + done.stdout + done.stderr

    def page(self, path: str) -> str | None:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/payments/{path}") as answer:
                return str(answer.read().decode())
        except URLError:
            return None

    def python(self, code: str) -> str:
        words = [sys.executable, "manage.py", "shell", "-v0", "-c", code]
        return subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=True
        ).stdout

    def stop(self) -> None:
        for process in self.background:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


@pytest.fixture
def follower(tmp_path: Path, home: Path) -> Iterator[Follower]:
    follower = Follower(tmp_path)
    yield follower
    follower.stop()


def test_the_tutorial_works(follower: Follower) -> None:
    for block in blocks():
        if "commandbus_tsq" in block.text:
            wait_until(lambda: "INVALID_DATA" in follower.python(TROUBLES), "the command in trouble")
        follower.follow(block)
        if "curl" in block.text:
            wait_until(lambda: "<strong>SUCCESS</strong>" in (follower.page(f"{KEY}/") or ""), "the outcome")
    wait_until(lambda: "87.50" in follower.python(BALANCE), "the debit that was edited")


CURL = f"""#!{sys.executable}
import sys, urllib.request
_, _, method, url, _, header, _, body = sys.argv
request = urllib.request.Request(url, body.encode(), dict([header.split(": ")]), method=method)
print(urllib.request.urlopen(request).read().decode())
"""
TROUBLES = """
from commandbus import ops
print([command.last_error_code for command in ops.list_troubleshooting("payments")])
"""
BALANCE = """
from payments.models import Account
print(Account.objects.get().balance)
"""
