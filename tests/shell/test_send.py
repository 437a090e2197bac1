from __future__ import annotations

from pathlib import Path
from uuid import UUID, uuid4

import pytest
from django.db import OperationalError

from commandbus import api, send_command
from commandbus.models import Audit, Command
from commandbus.ops import get_payload
from commandbus.pgmq import PgmqClient
from tests.shell.helpers import run, type_in

pytestmark = pytest.mark.django_db

NOBODY = UUID(int=0)


def test_one_command_is_sent_and_its_id_is_all_that_is_printed() -> None:
    ran = run("commandbus_send", "orders", "PlaceOrder", "--data", '{"amount": 5}')
    command = Command.objects.get()
    assert (ran.code, ran.out, ran.err) == (0, f"{command.command_id}\n", "")
    assert (command.command_type, command.max_attempts) == ("PlaceOrder", 3)
    assert get_payload("orders", command.command_id) == {"amount": 5}


def test_one_command_with_everything() -> None:
    command_id, correlation_id = uuid4(), uuid4()
    ran = run(
        *("commandbus_send", "orders", "PlaceOrder", "--data", "{}", "--id", str(command_id), "--delay", "60"),
        *("--correlation-id", str(correlation_id), "--reply-to", "other__replies"),
    )
    assert ran.out == f"{command_id}\n"
    command = Command.objects.get()
    assert (command.command_id, command.correlation_id) == (command_id, correlation_id)
    assert command.reply_queue == "other__replies"
    assert PgmqClient().read("orders__commands") == []  # it waits


def test_the_data_may_come_from_a_file_or_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "data.json"
    file.write_bytes(b'\xef\xbb\xbf{"from": "a file"}')
    from_file = run("commandbus_send", "orders", "PlaceOrder", "--data", f"@{file}")
    type_in(monkeypatch, b'{"from": "stdin"}')
    from_stdin = run("commandbus_send", "orders", "PlaceOrder", "--data", "-")
    assert get_payload("orders", UUID(from_file.out.strip())) == {"from": "a file"}
    assert get_payload("orders", UUID(from_stdin.out.strip())) == {"from": "stdin"}


def test_the_same_again_is_no_error_and_sends_nothing() -> None:
    again = ("commandbus_send", "orders", "PlaceOrder", "--data", "{}", "--id", str(NOBODY))
    assert run(*again) == run(*again)
    assert Audit.objects.count() == 1


def test_a_dry_run_checks_one_command_and_sends_nothing() -> None:
    ran = run("commandbus_send", "orders", "PlaceOrder", "--data", "{}", "--id", str(NOBODY), "--dry-run")
    assert ran.out == f"{NOBODY} would be sent\n"
    assert not Command.objects.exists()
    send_command("orders", "PlaceOrder", NOBODY, {"other": "content"})
    ran = run("commandbus_send", "orders", "PlaceOrder", "--data", "{}", "--id", str(NOBODY), "--dry-run")
    assert ran.code == 1
    assert f"'orders' already has {NOBODY} with another type or other data" in ran.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "Ship", "--data", "{}"], "domain 'nowhere' is not registered; known: orders, other"),
        (["nowhere", "Ship", "--file", "missing.jsonl"], "domain 'nowhere' is not registered; known: orders, other"),
        (["orders", "Ship"], "either --data '{…}' for one command, or --file FILE for many"),
        (["orders", "Ship", "--data", "{}", "--file", "x.jsonl"], "either --data"),
        (["orders", "--data", "{}"], "name the type of the command after the domain"),
        (["orders", "Ship", "--data", "{}", "--rejects", "x"], "--rejects is for --file"),
        (["orders", "Ship", "--data", "{}", "--id-from", "x"], "--id-from is for --file"),
        (["orders", "--file", "x.jsonl", "--delay", "3"], "--delay is for one command; in a file, each line says it"),
        (["orders", "--file", "x.jsonl", "--id-from", "a,"], "--id-from 'a,' has an empty name"),
        (["orders", "--file", "x.jsonl"], "x.jsonl cannot be read: No such file or directory"),
        (["orders", "Ship", "--data", "{"], "--data is not JSON: Expecting property name"),
        (["orders", "Ship", "--data", "[1]"], "--data must be a JSON object like {\"amount\": 5}, not '[1]'"),
        (["orders", "Ship", "--data", "@missing.json"], "--data @missing.json cannot be read: No such file"),
        (["orders", "Ship", "--data", '{"x": "\\u0000"}'], "the character \\u0000, which PostgreSQL cannot store"),
        (["orders", "Ship", "--data", "{}", "--id", "abc"], "--id must be a UUID, not 'abc'"),
        (["orders", "Ship", "--data", "{}", "--reply-to", "nobody"], "there is no reply queue 'nobody'"),
        (["orders", "Ship", "--data", "{}", "--delay", "-1"], "from 0 seconds to 100 years"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(arguments: list[str], words: str) -> None:
    ran = run("commandbus_send", *arguments)
    assert ran.code == 1
    assert ran.err.startswith("CommandError: ")
    assert words in ran.err
    assert not Command.objects.exists()


def test_data_that_are_no_text_are_named(tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_bytes(b"\xff")
    assert "is not UTF-8" in run("commandbus_send", "orders", "Ship", "--data", f"@{file}").err


def test_a_database_that_is_away_is_said_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise OperationalError("connection refused\n")

    monkeypatch.setattr(api, "try_send", away)
    ran = run("commandbus_send", "orders", "Ship", "--data", "{}")
    assert ran.err == "CommandError: the database has refused or cannot be reached: connection refused\n"


def test_what_a_terminal_would_obey_is_shown_and_not_sent_to_it() -> None:
    ran = run("commandbus_send", "orders", "Ship", "--data", "{}", "--id", "\x1b[2J")
    assert "\\x1b[2J" in ran.err
    assert "\x1b" not in ran.err
