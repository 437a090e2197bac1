from __future__ import annotations

import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.db import connection
from django.test import override_settings

from commandbus import api, list_batch_commands, list_batches, open_batch, send_command
from commandbus.ids import derived_id
from commandbus.messages import BatchMetadata, Status
from commandbus.models import Batch, Command, Domain
from commandbus.ops import get_payload
from commandbus.pgmq import PgmqClient
from commandbus.transitions import PostgresTransitions
from tests.batches.helpers import batch, counts, fail, finish, folded, make, nothing_is_left, receive
from tests.helpers import environment, wait_until
from tests.shell.helpers import Ran, Terminal, run, type_in

pytestmark = pytest.mark.django_db

TWO_CHUNKS = "commandbus.batches.CHUNK"


def line(number: int = 1, **changes: Any) -> str:
    fields = {"command_id": str(UUID(int=number)), "type": "PlaceOrder", "data": {"n": number}, **changes}
    return json.dumps({name: value for name, value in fields.items() if value != ...})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "commands.jsonl"


def act(*arguments: object, **streams: Any) -> Ran:
    return run("commandbus_batch", *(str(one) for one in arguments), **streams)


def create(file: Path, *options: str, content: Sequence[str] | None = None, **streams: Any) -> Ran:
    if content is not None:
        file.write_text("".join(f"{one}\n" for one in content))
    return act("create", "orders", file, *options, **streams)


def made(ran: Ran) -> BatchMetadata:
    assert ran.code == 0, ran.err
    return batch(UUID(ran.out.strip()))


def test_the_lines_of_a_file_become_a_batch_whose_id_is_all_of_standard_output(file: Path) -> None:
    other = line(2, type="Hang", correlation_id=str(UUID(int=9)), reply_to="other__replies", delay=60)
    ran = create(file, content=[line(1), "", other])
    [batch_id] = [one.batch_id for one in list_batches("orders")]
    assert (ran.code, ran.out) == (0, f"{batch_id}\n")
    assert ran.err.startswith("2 lines, ")
    assert counts(batch_id) == (2, 0, 0, 0, 0)
    assert not batch(batch_id).is_open
    first, second = list_batch_commands("orders", batch_id)
    assert (first.command_type, first.max_attempts) == ("PlaceOrder", 3)
    assert (second.command_type, second.max_attempts) == ("Hang", 1)  # as its handler says
    assert (second.correlation_id, second.reply_queue) == (UUID(int=9), "other__replies")
    assert len(PgmqClient().read("orders__commands", qty=10)) == 1  # the other one waits


def test_a_batch_has_a_name_and_data_of_its_own(file: Path) -> None:
    data = file.parent / "custom.json"
    data.write_text('{"by": "import"}')
    found = made(create(file, "--name", "May", "--custom-data", f"@{data}", content=[line()]))
    assert (found.name, found.custom_data, found.on_complete) == ("May", {"by": "import"}, None)


def test_the_command_that_is_sent_in_the_end_has_an_id_that_is_told_at_once(file: Path) -> None:
    ran = create(file, "--on-complete-type", "SendMail", "--on-complete-data", '{"to": "me"}', content=[line()])
    batch_id = made(ran).batch_id
    told = re.search(r"when it completes, SendMail is sent as (\S+)", ran.err)
    assert told is not None
    finish(receive())
    folded(batch_id)
    [sent] = receive()
    assert str(sent.command.command_id) == told[1]
    assert sent.command.command_type == "SendMail"
    assert (sent.command.data["to"], sent.command.data["batch"]["status"]) == ("me", "COMPLETED")


def test_the_command_in_the_end_needs_no_data(file: Path) -> None:
    callback = made(create(file, "--on-complete-type", "SendMail", content=[line()])).on_complete
    assert callback is not None
    assert (callback["command_type"], callback["data"]) == ("SendMail", {})


def test_lines_without_a_type_have_that_of_the_option(file: Path) -> None:
    found = made(create(file, "--type", "Default", content=[line(1, type=...), line(2)]))
    assert [one.command_type for one in list_batch_commands("orders", found.batch_id)] == ["Default", "PlaceOrder"]


def test_a_batch_from_csv_with_made_ids(tmp_path: Path) -> None:
    file = tmp_path / "commands.csv"
    file.write_text("order,amount\n7,5\n8,\n")
    found = made(create(file, "--type", "PlaceOrder", "--id-from", "order"))
    assert found.total_count == 2
    payloads = [get_payload("orders", derived_id("orders", "PlaceOrder", [order])) for order in ("7", "8")]
    assert payloads == [{"order": "7", "amount": "5"}, {"order": "8", "amount": ""}]


def test_a_batch_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, f"{line(1)}\n".encode())
    assert made(act("create", "orders", "-")).total_count == 1
    type_in(monkeypatch, f"command_id,type\n{UUID(int=2)},PlaceOrder\n".encode())
    assert made(act("create", "orders", "-", "--format", "csv")).total_count == 1


def test_where_the_name_does_not_tell_the_format_must(tmp_path: Path) -> None:
    file = tmp_path / "commands.txt"
    ran = create(file, content=[line()])
    assert "say what it holds: --format jsonl or --format csv" in ran.err
    assert nothing_is_left()
    assert made(create(file, "--format", "jsonl")).total_count == 1


def test_a_packed_batch(tmp_path: Path) -> None:
    file = tmp_path / "commands.jsonl.gz"
    file.write_bytes(gzip.compress(line().encode()))
    assert made(create(file)).total_count == 1


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("{", "not JSON"),
        (line(type=...), "there is no type: write it into the line, or name it with --type"),
        (line(command_id=...), "add it, or name the fields of the data that identify a command: --id-from"),
        (line(command_id="abc"), "command_id must be a UUID, not 'abc'"),
        (line(data=[1]), "must be a JSON object (a dict), not list"),
        (line(data={"x": "y" * 2000}), "takes more bytes than the limit of 1000"),
        (line(reply_to="nobody"), "there is no reply queue 'nobody'"),
        (line(delay=-1), "delay must be from 0 seconds to 100 years"),
        ("x" * 80_000, "longer than 71,536 bytes"),
    ],
)
def test_one_line_in_error_is_named_and_nothing_is_created(
    file: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, reason: str
) -> None:
    monkeypatch.setattr(TWO_CHUNKS, 1)
    with override_settings(COMMANDBUS={"MAX_PAYLOAD_BYTES": 1000}):
        ran = create(file, content=[line(10), "", wrong, line(11)])
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"CommandError: {file}:3: ")
    assert reason in ran.err
    assert ran.err.endswith("; nothing was created\n")
    assert nothing_is_left()


@pytest.mark.parametrize("chunk", [1, 1000])
@pytest.mark.parametrize(
    ("again", "reason"),
    [(line(2), f"command {UUID(int=2)} is in the batch twice"), (line(2, type="Other"), "with another type or other")],
)
def test_an_id_that_a_file_has_twice_is_named_with_the_line_of_the_second(
    file: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, again: str, reason: str
) -> None:
    monkeypatch.setattr(TWO_CHUNKS, chunk)
    ran = create(file, content=["", line(1), line(2), "", again, line(3)])
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"CommandError: {file}:5: ")
    assert reason in ran.err
    assert "number" not in ran.err
    assert nothing_is_left()


@pytest.mark.parametrize("data", [{"n": 2}, {"other": "content"}])
def test_what_was_sent_before_is_named_with_its_line(file: Path, data: dict[str, Any]) -> None:
    send_command("orders", "PlaceOrder", UUID(int=2), data)
    ran = create(file, content=["", line(1), line(2)])
    assert ran.err.startswith(f"CommandError: {file}:3: ")
    assert str(UUID(int=2)) in ran.err
    assert not Batch.objects.exists()
    assert Command.objects.count() == 1


def test_the_same_file_again_does_not_make_a_second_batch(file: Path) -> None:
    create(file, content=[line(1), line(2)])
    assert create(file).code == 1
    assert Batch.objects.count() == 1


def test_data_that_only_postgresql_finds_too_large_are_named_with_their_line(file: Path) -> None:
    Domain.objects.filter(name="orders").update(max_payload_bytes=100)
    ran = create(file, content=[line(1), "", line(2, data={"x": "y" * 200}), line(3)])
    assert ran.err.startswith(f"CommandError: {file}:3: command {UUID(int=2)}: its data takes more bytes than what")
    assert nothing_is_left()


@pytest.mark.parametrize("content", [[], ["", "  "]])
def test_a_file_without_commands_is_an_error(file: Path, content: list[str]) -> None:
    ran = create(file, content=content)
    assert ran.code == 1
    assert f"{file}: there are no commands in it, and a batch needs at least one" in ran.err
    assert nothing_is_left()


def test_csv_without_commands_or_with_a_wrong_header_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "commands.csv"
    assert f"{file}:1: there is no header" in create(file, content=[]).err
    assert f"{file}:1: the header has the column 'a' twice" in create(file, content=["a,a"]).err
    assert f"{file}: there are no commands" in create(file, content=["a,b"]).err
    assert nothing_is_left()


def test_a_file_that_breaks_off_makes_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TWO_CHUNKS, 1)
    file = tmp_path / "commands.jsonl.gz"
    whole = gzip.compress("".join(f"{line(n, data={'x': os.urandom(3000).hex()})}\n" for n in range(1, 41)).encode())
    file.write_bytes(whole[: len(whole) // 2])
    ran = create(file)
    assert ran.code == 1
    assert re.search(r"\.gz: stopped after \d+ lines: Compressed file ended .*; nothing was created", ran.err)
    assert nothing_is_left()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["create", "nowhere", "absent.jsonl"], "domain 'nowhere' is not registered"),
        (["create", "orders__replies", "absent.jsonl"], "domain"),
        (["create", "orders", "absent.jsonl"], "absent.jsonl cannot be read: No such file"),
        (["create", "orders"], "the following arguments are required: file"),
        (["create", "orders", "FILE", "--id-from", "a,,b"], "--id-from 'a,,b' has an empty name"),
        (["create", "orders", "FILE", "--name", ""], "the name of a batch must have 1 to 255 characters"),
        (["create", "orders", "FILE", "--custom-data", "[1]"], "--custom-data must be a JSON object"),
        (["create", "orders", "FILE", "--custom-data", "{"], "--custom-data is not JSON"),
        (["create", "orders", "FILE", "--on-complete-data", "{}"], "--on-complete-data needs --on-complete-type"),
        (
            ["create", "orders", "FILE", "--on-complete-type", "X", "--on-complete-data", '{"batch": 1}'],
            'its data must leave the key "batch" free',
        ),
        (["create", "orders", "FILE", "--on-complete-type", ""], "the type must have 1 to 255 characters"),
        (["create", "orders", "-", "--custom-data", "-"], "standard input can be read once"),
        (["list", "nowhere"], "domain 'nowhere' is not registered"),
        (["list", "orders", "--status", "DONE"], "invalid choice: 'DONE'"),
        (["list", "orders", "--limit", "0"], "'0' is not a number from 1 on"),
        (["show", "orders", "abc"], "'abc' is not the id of a batch, which is a UUID"),
        (["show", "orders", UUID(int=1)], f"there is no batch {UUID(int=1)} in domain 'orders'"),
        (["watch", "orders", UUID(int=1)], f"there is no batch {UUID(int=1)} in domain 'orders'"),
        (["cancel", "orders", UUID(int=1)], "the following arguments are required: --reason"),
        (["cancel", "orders", UUID(int=1), "--reason", "x"], f"there is no batch {UUID(int=1)} in domain 'orders'"),
        (["retry", "orders", UUID(int=1)], f"there is no batch {UUID(int=1)} in domain 'orders'"),
        (["seal", "orders", UUID(int=1)], f"there is no batch {UUID(int=1)} in domain 'orders'"),
        (["repair", "nowhere"], "domain 'nowhere' is not registered"),
        ([], "the following arguments are required: ACTION"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(file: Path, arguments: list[object], words: str) -> None:
    file.write_text(line())
    ran = act(*(file if word == "FILE" else word for word in arguments))
    assert (ran.code, ran.out) == (1, "")
    assert words in ran.err
    assert nothing_is_left()


def test_a_dry_run_checks_everything_and_creates_nothing(file: Path) -> None:
    ran = create(file, "--dry-run", "--on-complete-type", "SendMail", content=[line(1), line(2)])
    assert (ran.code, ran.out) == (0, "a batch of 2 commands would be created\n")
    assert "SendMail" not in ran.err
    assert nothing_is_left()
    assert PgmqClient().read("orders__commands", qty=10) == []
    assert create(file, "--dry-run", content=[line(1), line(1)]).code == 1


def test_no_more_is_read_than_the_chunk_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(io.BytesIO):
        lines_read = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            self.lines_read += 1
            return super().readline(size)

    stream = Counting("".join(f"{line(n)}\n" for n in range(1, 8)).encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
    monkeypatch.setattr(TWO_CHUNKS, 2)
    ahead = []
    real = api.try_send

    def spy(domain: str, commands: Sequence[Any], batch_id: UUID) -> dict[UUID, str]:
        ahead.append((stream.lines_read, len(commands)))
        return real(domain, commands, batch_id)

    monkeypatch.setattr("commandbus.batches.try_send", spy)
    assert made(act("create", "orders", "-")).total_count == 7
    assert ahead == [(2, 2), (4, 2), (6, 2), (8, 1)]


def test_creating_has_a_bar_on_a_terminal_and_an_error_takes_it_away(file: Path) -> None:
    ran = create(file, content=[line(1), line(2)], stderr=Terminal())
    assert "[##############################] 100 %  2 lines, " in ran.err
    assert ran.err.endswith("/s\n")
    ran = create(file, content=[line(3), "{"], stderr=Terminal())
    assert f"\r\033[KCommandError: {file}:2: not JSON" in ran.err


def test_verbosity_0_says_the_id_and_nothing_else(file: Path) -> None:
    ran = create(file, "-v", "0", "--on-complete-type", "SendMail", content=[line(1)])
    assert (made(ran).total_count, ran.err) == (1, "")


def interrupting(monkeypatch: pytest.MonkeyPatch, name: str, times: int = 1) -> None:
    """Ctrl-C comes when this is called."""
    real: Callable[..., Any] = getattr(PostgresTransitions, name)

    def interrupt(self: PostgresTransitions, *arguments: Any, **options: Any) -> Any:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        return real(self, *arguments, **options)

    monkeypatch.setattr(PostgresTransitions, name, interrupt)


def test_ctrl_c_while_it_is_read_leaves_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TWO_CHUNKS, 2)
    interrupting(monkeypatch, "send")
    ran = create(file, content=[line(1), line(2), line(3)])
    assert (ran.code, ran.out) == (130, "")
    assert f"{file}: interrupted after 2 lines; nothing was created" in ran.err
    assert nothing_is_left()


def test_ctrl_c_that_comes_when_all_is_sent_does_not_hide_what_was_created(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting(monkeypatch, "seal_batch")
    ran = create(file, content=[line(1)])
    assert ran.code == 130
    assert counts(UUID(ran.out.strip())) == (1, 0, 0, 0, 0)
    assert "interrupted, but the batch was created already" in ran.err


def test_a_second_ctrl_c_does_not_wait_and_does_not_say_what_it_cannot_know(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting(monkeypatch, "seal_batch", times=2)
    ran = create(file, content=[line(1)])
    assert (ran.code, ran.out) == (130, "")
    assert "interrupted after 1 line; commandbus_batch list knows whether it was created" in ran.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.django_db(transaction=True)
def test_ctrl_c_ends_a_real_process_that_waits_for_its_input() -> None:
    def last_row() -> tuple[int, bool]:
        """A sequence tells of open transactions of others, too."""
        with connection.cursor() as cursor:
            cursor.execute("SELECT last_value, is_called FROM command_bus_command_id_seq")
            last, is_called = cursor.fetchone()
        return last, is_called

    before = last_row()
    process = subprocess.Popen(
        [sys.executable, "-m", "django", "commandbus_batch", "create", "orders", "-"],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write("".join(f"{line(n)}\n" for n in range(1, 1002)))
    process.stdin.flush()
    wait_until(lambda: last_row() > before, "the first chunk")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, ""), err
    assert "stdin: interrupted after" in err
    assert "nothing was created" in err
    assert "Traceback" not in err
    assert nothing_is_left()


def words_of(ran: Ran, batch_id: UUID) -> list[str]:
    [found] = [row for row in ran.lines if row.startswith(str(batch_id))]
    return found.split()


def test_the_list_has_the_newest_first_with_its_counts() -> None:
    first, second = make(4, name="May \x1b[31m"), make(1)
    one, other, third, _ = receive(4)
    finish([one])
    finish([other], Status.FAILED)
    fail([third])
    ran = act("list", "orders")
    assert ran.code == 0
    assert ran.lines[0].split() == [
        *("ID", "NAME", "STATUS", "ENDED", "TOTAL", "FAILED", "CANCELED", "TROUBLESHOOTING", "CREATED", "AGE")
    ]
    assert [row.split()[0] for row in ran.lines[1:]] == [str(second), str(first)]
    assert words_of(ran, first)[1:9] == ["May", "\\x1b[31m", "IN_PROGRESS", "2", "4", "1", "0", "1"]
    assert words_of(ran, second)[1:6] == ["PENDING", "0", "1", "0", "0"]
    assert batch(second).created_at.strftime("%Y-%m-%d %H:%M:%S") in ran.out


def test_the_list_says_what_is_open_and_what_was_canceled() -> None:
    opened, canceled = open_batch("orders"), make(1)
    receive()
    act("cancel", "orders", canceled, "--reason", "over", "--yes")
    ran = act("list", "orders")
    assert words_of(ran, opened)[-1] == "open"
    assert words_of(ran, canceled)[-1] == "canceled"


def test_the_list_can_be_cut_and_filtered_by_status() -> None:
    done, *others = [make(1) for _ in range(3)]
    finish(receive(1))
    folded(done)
    ran = act("list", "orders", "--limit", "2")
    assert [row.split()[0] for row in ran.lines[1:3]] == [str(one) for one in reversed(others)]
    assert ran.lines[-1] == "there are more; --limit shows them"
    for status in ("COMPLETED", "completed"):
        ran = act("list", "orders", "--status", status)
        assert [row.split()[0] for row in ran.lines[1:]] == [str(done)]
    assert act("list", "orders", "--limit", "3").lines[-1] != "there are more; --limit shows them"


def test_an_empty_list_says_so() -> None:
    assert act("list", "orders").out == "there are no batches in orders\n"
    assert act("list", "orders", "--status", "PENDING").out == "there are no batches like that in orders\n"
    assert json.loads(act("list", "orders", "--json").out) == {"batches": [], "more": False}


def test_the_list_as_json() -> None:
    make(1)
    batch_id = make(2, name="May", custom_data={"a": 1})
    found = json.loads(act("list", "orders", "--limit", "1", "--json").out)
    [one] = found["batches"]
    assert found["more"] is True
    assert (one["batch_id"], one["name"], one["status"]) == (str(batch_id), "May", "PENDING")
    assert (one["total_count"], one["ended_count"], one["waiting_count"], one["custom_data"]) == (2, 0, 2, {"a": 1})


def test_show_has_all_that_is_known_of_a_batch(file: Path) -> None:
    options = ["--name", "May", "--custom-data", '{"by": "\\u001b"}', "--on-complete-type", "SendMail"]
    batch_id = made(create(file, *options, content=[line(n) for n in range(1, 5)])).batch_id
    one, other, third, _ = receive()
    finish([one])
    finish([other], Status.FAILED)
    fail([third])
    ran = act("show", "orders", batch_id)
    assert ran.code == 0
    assert "\x1b" not in ran.out
    facts, custom, callback, failed, troubled, history = ran.out.split("\n\n")
    told = dict(re.split(r"  +", fact, maxsplit=1) for fact in facts.splitlines())
    assert (told["batch"], told["domain"], told["name"], told["status"]) == (
        *(str(batch_id), "orders", "May", "IN_PROGRESS"),
    )
    names = ("commands", "completed", "failed", "canceled", "in troubleshooting", "waiting or running")
    assert [told[name] for name in names] == ["4", "1", "1", "0", "1", "1"]
    assert {"created at", "sealed at", "started at"} <= told.keys()
    assert "completed at" not in told
    assert custom.startswith('CUSTOM DATA\n{\n  "by"')
    assert callback.startswith("ON COMPLETE\n")
    assert '"command_type": "SendMail"' in callback
    assert failed.startswith("FAILED\n")
    assert str(other.command.command_id) in failed
    assert troubled.startswith("IN TROUBLESHOOTING\n")
    assert str(third.command.command_id) in troubled
    assert "BATCH_SEALED" in history
    assert str(one.command.command_id) not in ran.out


def test_show_names_ten_of_the_commands_that_did_not_work() -> None:
    batch_id = make(12)
    fail(receive())
    ran = act("show", "orders", batch_id)
    assert ran.out.count("BAD") == 10
    assert "… and 2 more" in ran.out


def test_show_of_a_plain_batch_has_no_empty_parts() -> None:
    batch_id = open_batch("orders", 5)
    ran = act("show", "orders", batch_id)
    assert "commands            0 of 5 that are expected" in ran.out
    for part in ("name", "CUSTOM", "ON COMPLETE", "FAILED", "TROUBLESHOOTING", "sealed at", "HISTORY"):
        assert part not in ran.out


def test_show_says_what_became_of_the_command_in_the_end(file: Path) -> None:
    options = ["--on-complete-type", "SendMail"]
    batch_id = made(create(file, *options, content=[line()])).batch_id
    finish(receive())
    folded(batch_id)
    assert "on complete sent at" in act("show", "orders", batch_id).out
    Batch.objects.filter(batch_id=batch_id).update(callback_sent_at=None, callback_error="no \x1b")
    assert "on complete failed  no \\x1b" in act("show", "orders", batch_id).out
    assert "on complete failed" in act("list", "orders").out


def test_show_as_json() -> None:
    batch_id = make(2)
    one, _ = receive()
    fail([one])
    found = json.loads(act("show", "orders", batch_id, "--json").out)
    assert found["batch"]["batch_id"] == str(batch_id)
    assert (found["batch"]["in_troubleshooting_count"], found["batch"]["waiting_count"]) == (1, 1)
    assert [event["event"] for event in found["audit"]] == ["BATCH_SEALED"]
    assert [command["command_id"] for command in found["in_troubleshooting"]] == [str(one.command.command_id)]
    assert found["failed"] == []


@pytest.mark.parametrize("position", [0, 2])
def test_what_every_command_of_django_takes_may_stand_before_or_after_the_action(file: Path, position: int) -> None:
    file.write_text(line())
    words: list[object] = ["create", "orders", file]
    words[position:position] = ["--verbosity", "0", "--settings", "tests.settings"]
    assert act(*words).err == ""
