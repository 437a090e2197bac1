from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import OperationalError, connection, transaction
from django.test import override_settings

from commandbus import NewCommand, api, send_command
from commandbus.ids import derived_id
from commandbus.models import Audit, Command, Domain
from commandbus.ops import get_payload
from commandbus.pgmq import PgmqClient
from commandbus.shell import bulk
from tests.helpers import environment, wait_until
from tests.shell.helpers import Ran, Terminal, run, type_in

pytestmark = pytest.mark.django_db


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "commands.jsonl"


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "CHUNK_LINES", 2)


def line(number: int = 1, **changes: Any) -> str:
    fields = {"command_id": str(UUID(int=number)), "type": "PlaceOrder", "data": {"n": number}, **changes}
    return json.dumps({name: value for name, value in fields.items() if value != ...})


def send(file: Path, *options: str, content: Sequence[str] | None = None, **streams: Any) -> Ran:
    if content is not None:
        file.write_text("".join(f"{one}\n" for one in content))
    return run("commandbus_send", "orders", "--file", str(file), *options, **streams)


def summary(ran: Ran) -> dict[str, str]:
    return {name.strip(): value for name, _, value in (row.rpartition(" ") for row in ran.lines)}


def counts(ran: Ran) -> list[str]:
    """sent, already there, in error"""
    return list(summary(ran).values())[:3]


def sent() -> list[int]:
    return sorted(command_id.int for command_id in Command.objects.values_list("command_id", flat=True))


def test_every_line_is_sent_and_a_small_table_says_so(file: Path) -> None:
    other = line(2, type="Hang", correlation_id=str(UUID(int=9)), reply_to="other__replies", delay=60)
    ran = send(file, content=[line(1), other])
    assert ran.code == 0
    assert list(summary(ran)) == ["sent", "already there", "in error", "seconds"]
    assert counts(ran) == ["2", "0", "0"]
    first, second = Command.objects.order_by("id")
    assert (first.command_type, first.max_attempts) == ("PlaceOrder", 3)
    assert (second.command_type, second.max_attempts) == ("Hang", 1)  # as its handler says
    assert (second.correlation_id, second.reply_queue) == (UUID(int=9), "other__replies")
    assert len(PgmqClient().read("orders__commands", qty=10)) == 1  # the other one waits
    assert get_payload("orders", UUID(int=2)) == {"n": 2}


def test_a_second_run_sends_nothing_twice(file: Path) -> None:
    send(file, content=[line(1), line(2)])
    ran = send(file, content=[line(1), line(2), line(3)])
    assert (ran.code, counts(ran)) == (0, ["1", "2", "0"])
    assert Audit.objects.count() == 3


def test_lines_without_a_type_have_that_of_the_command_line(file: Path) -> None:
    file.write_text(line(1, type=...) + "\n" + line(2, type=None) + "\n" + line(3, type="Other"))
    run("commandbus_send", "orders", "Default", "--file", str(file))
    assert list(Command.objects.order_by("id").values_list("command_type", flat=True)) == [
        "Default",
        "Default",
        "Other",
    ]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("{", "not JSON"),
        ('"text"', "a JSON object is needed"),
        (line(amount=3), "unknown: 'amount'"),
        (line(type=...), "there is no type: write it into the line, or name it after the domain"),
        (line(type=7), "the type must have 1 to 255 characters, not 7"),
        (line(type=""), "the type must have 1 to 255 characters"),
        (line(command_id=...), "add it, or name the fields of the data that identify a command: --id-from"),
        (line(command_id="abc"), "command_id must be a UUID, not 'abc'"),
        (line(command_id=7), "command_id must be a UUID, not 7"),
        (line(correlation_id="abc"), "must be a UUID, not 'abc'"),
        (line(data=...), "there is no data"),
        (line(data=[1]), "must be a JSON object (a dict), not list"),
        (line(data=None), "must be a JSON object (a dict), not NoneType"),
        (line(data={"x": "\x00"}), "\\u0000, which PostgreSQL cannot store"),
        (line(data={"x": "\ud800"}), "half a surrogate pair"),
        (line(data={"x": float("nan")}), "x is nan"),
        (line(data={"x": "y" * 2000}), "takes more bytes than the limit of 1000"),
        (line(reply_to="nobody"), "there is no reply queue 'nobody'"),
        (line(reply_to="orders__commands"), "there is no reply queue 'orders__commands'"),
        (line(delay=-1), "delay must be from 0 seconds to 100 years"),
        (line(delay="soon"), "delay must be seconds"),
        (line(delay=True), "delay must be seconds"),
        ("x" * 80_000, "longer than 71,536 bytes"),
    ],
)
def test_a_line_in_error_is_named_and_all_others_are_sent(file: Path, wrong: str, reason: str) -> None:
    with override_settings(COMMANDBUS={"MAX_PAYLOAD_BYTES": 1000}):
        ran = send(file, content=[line(10), wrong, line(11)])
    assert (ran.code, counts(ran)) == (1, ["2", "0", "1"])
    assert sent() == [10, 11]
    [named, _] = ran.err.splitlines()
    assert named.startswith(f"{file}:2: ")
    assert reason in named


def test_data_that_only_postgresql_finds_too_large_take_nothing_with_them(file: Path) -> None:
    Domain.objects.filter(name="orders").update(max_payload_bytes=100)
    ran = send(file, content=[line(1), line(2, data={"x": "y" * 200}), line(3)])
    assert (ran.code, counts(ran), sent()) == (1, ["2", "0", "1"], [1, 3])
    assert f"{file}:2: command {UUID(int=2)}: its data takes more bytes than what PostgreSQL allows" in ran.err


def test_an_id_that_has_other_content_takes_nothing_with_it(file: Path) -> None:
    send_command("orders", "PlaceOrder", UUID(int=2), {"other": "content"})
    ran = send(file, content=[line(1), line(2), line(3)])
    assert (ran.code, counts(ran), sent()) == (1, ["2", "0", "1"], [1, 2, 3])
    assert f"{file}:2: {UUID(int=2)} was sent before" in ran.err
    assert get_payload("orders", UUID(int=2)) == {"other": "content"}


@pytest.mark.parametrize("chunk", [2, 1000])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_of_an_id_that_a_file_has_twice_the_first_stays(
    file: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, dry: list[str]
) -> None:
    """Wherever a chunk ends; and so says a dry run."""
    monkeypatch.setattr(bulk, "CHUNK_LINES", chunk)
    twice = [line(1), line(1, data={"n": 1.0}), line(2), line(3), line(1), line(3, type="Other")]
    ran = send(file, *dry, content=twice)
    assert (ran.code, counts(ran)) == (1, ["3", "1", "2"])
    assert [named.partition(": ")[0] for named in ran.err.splitlines()[:2]] == [f"{file}:2", f"{file}:6"]
    if dry:
        assert not Command.objects.exists()
    else:
        assert get_payload("orders", UUID(int=1)) == {"n": 1}
        assert not Command.objects.filter(command_type="Other").exists()


def test_a_conflict_that_comes_up_in_the_second_try_is_taken_out_too(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else sends the same ids in this moment."""
    real, tries = api.try_send, []

    def racing(domain: str, commands: Sequence[NewCommand]) -> dict[UUID, str]:
        tries.append(len(commands))
        if len(tries) < 3:
            real(domain, [NewCommand("Other", UUID(int=len(tries)), {})])
        return real(domain, commands)

    monkeypatch.setattr(api, "try_send", racing)
    ran = send(file, content=[line(1), line(2), line(3)])
    assert tries == [3, 2, 1]
    assert counts(ran) == ["1", "0", "2"]


def test_ids_can_be_made_from_fields_of_the_data(file: Path) -> None:
    content = [line(command_id=..., data={"account": "DE-1", "month": 7, "amount": 3}), line(2), line(command_id=None)]
    ran = send(file, "--id-from", "account,month", content=content)
    made = derived_id("orders", "PlaceOrder", ["DE-1", 7])
    assert set(Command.objects.values_list("command_id", flat=True)) == {made, UUID(int=2)}  # its own id comes first
    assert f"{file}:3: the data have no field 'account', which --id-from names" in ran.err


@pytest.mark.parametrize(
    ("data", "reason"),
    [("text", "data must be a JSON object, not str"), ({"key": "\ud800"}, "no id can be made from key")],
)
def test_fields_that_make_no_id_are_named(file: Path, data: Any, reason: str) -> None:
    ran = send(file, "--id-from", "key", content=[line(command_id=..., data=data)])
    assert reason in ran.err


def test_changed_data_under_the_same_made_id_are_an_error(file: Path) -> None:
    """So a field that does not identify a command is found out."""
    content = [line(command_id=..., data={"account": "DE-1", "amount": n}) for n in (1, 2)]
    ran = send(file, "--id-from", "account", content=content)
    assert counts(ran) == ["1", "0", "1"]


def test_csv_with_a_header(tmp_path: Path) -> None:
    file = tmp_path / "commands.csv"
    file.write_text("order,delay,amount\n7,,5\n8,3600,\n")
    ran = run("commandbus_send", "orders", "PlaceOrder", "--file", str(file), "--id-from", "order")
    assert (ran.code, counts(ran)) == (0, ["2", "0", "0"])
    payloads = [get_payload("orders", derived_id("orders", "PlaceOrder", [order])) for order in ("7", "8")]
    assert payloads == [{"order": "7", "amount": "5"}, {"order": "8", "amount": ""}]
    assert len(PgmqClient().read("orders__commands", qty=10)) == 1


@pytest.mark.parametrize("name", ["commands.jsonl.gz", "commands.ndjson"])
def test_names_tell_what_a_file_holds(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(gzip.compress(line().encode()) if name.endswith(".gz") else line().encode())
    assert counts(send(file)) == ["1", "0", "0"]


def test_where_the_name_does_not_tell_the_format_must(tmp_path: Path) -> None:
    file = tmp_path / "commands.txt"
    ran = send(file, content=[line()])
    assert (ran.code, sent()) == (1, [])
    assert "say what it holds: --format jsonl or --format csv" in ran.err
    assert counts(send(file, "--format", "jsonl")) == ["1", "0", "0"]


def test_lines_may_come_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, f"{line(1)}\n[]\n".encode())
    ran = run("commandbus_send", "orders", "--file", "-")
    assert (ran.code, counts(ran)) == (1, ["1", "0", "1"])
    assert "stdin:2: a JSON object is needed" in ran.err
    type_in(monkeypatch, f"command_id,type\n{UUID(int=2)},PlaceOrder\n".encode())
    assert counts(run("commandbus_send", "orders", "--file", "-", "--format", "csv")) == ["1", "0", "0"]


def test_lines_may_come_from_a_named_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=[line()])
    writer.start()
    assert counts(send(pipe)) == ["1", "0", "0"]
    writer.join()


@pytest.mark.parametrize("name", ["rejects.jsonl", "rejects.jsonl.gz"])
def test_rejects_are_kept_as_they_are_to_be_corrected_and_sent_again(file: Path, name: str) -> None:
    rejects = file.parent / name
    wrong = ['{"type":   "Ship"}', line(2, data={"other": 1}), line(3, delay=-1), "y" * 80_000]
    send_command("orders", "PlaceOrder", UUID(int=2), {})
    with override_settings(COMMANDBUS={"MAX_PAYLOAD_BYTES": 1000}):
        ran = send(file, "--rejects", str(rejects), content=[line(1), wrong[0], wrong[1], wrong[2], line(4), wrong[3]])
        assert counts(ran) == ["2", "0", "4"]
    kept = gzip.decompress(rejects.read_bytes()) if name.endswith(".gz") else rejects.read_bytes()
    assert kept.decode() == "".join(f"{one}\n" for one in wrong)
    corrected = file.parent / "corrected.jsonl"
    assert send(corrected, content=[line(3)]).code == 0
    assert sent() == [1, 2, 3, 4]


def test_rejects_of_csv_have_the_header(tmp_path: Path) -> None:
    file, rejects = tmp_path / "commands.csv", tmp_path / "rejects.csv"
    header = "\ufeffcommand_id,type,text"
    file.write_text(f'{header}\n{UUID(int=1)},Ship,right\nabc,Ship,"two\nlines"\n{UUID(int=2)},,x')
    ran = send(file, "--rejects", str(rejects))
    assert counts(ran) == ["1", "0", "2"]
    assert rejects.read_text() == f'{header}\nabc,Ship,"two\nlines"\n{UUID(int=2)},,x'
    assert rejects.name not in ran.err
    assert [named.split(": ")[0] for named in ran.err.splitlines()[:2]] == [f"{file}:3", f"{file}:5"]


def test_the_file_that_is_read_cannot_hold_the_rejects(file: Path) -> None:
    ran = send(file, "--rejects", str(file), content=[line()])
    assert "is the file that is read; name another one" in ran.err
    assert file.read_text() == line() + "\n"
    assert not Command.objects.exists()


def test_rejects_that_cannot_be_written_are_named_before_anything_is_sent(file: Path) -> None:
    ran = send(file, "--rejects", str(file.parent), content=[line()])
    assert "cannot be written: Is a directory" in ran.err
    assert not Command.objects.exists()


def test_rejects_of_the_last_run_do_not_stay(file: Path) -> None:
    rejects = file.parent / "rejects.jsonl"
    rejects.write_text("old")
    assert send(file, "--rejects", str(rejects), content=[line()]).code == 0
    assert rejects.read_text() == ""


def test_a_dry_run_says_what_would_be_and_writes_nothing(file: Path, small_chunks: None) -> None:
    send_command("orders", "PlaceOrder", UUID(int=1), {"n": 1})
    rejects = file.parent / "rejects.jsonl"
    ran = send(file, "--dry-run", "--rejects", str(rejects), content=[line(1), line(2), line(3), "{", line(2)])
    assert ran.code == 1
    assert list(summary(ran)) == ["would be sent", "would be there already", "would be in error", "seconds"]
    assert counts(ran) == ["2", "2", "1"]
    assert sent() == [1]
    assert Audit.objects.count() == 1
    assert len(PgmqClient().read("orders__commands", qty=10)) == 1
    assert rejects.read_text() == "{\n"


@pytest.mark.usefixtures("small_chunks")
def test_no_more_is_read_than_the_chunk_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(io.BytesIO):
        lines_read = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            self.lines_read += 1
            return super().readline(size)

    stream = Counting("".join(f"{line(n)}\n" for n in range(1, 8)).encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
    ahead = []
    real = api.try_send

    def spy(domain: str, commands: Sequence[NewCommand]) -> dict[UUID, str]:
        ahead.append((stream.lines_read, len(commands)))
        return real(domain, commands)

    monkeypatch.setattr(api, "try_send", spy)
    run("commandbus_send", "orders", "--file", "-")
    assert ahead == [(2, 2), (4, 2), (6, 2), (8, 1)]


def test_a_chunk_is_limited_in_bytes_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "CHUNK_BYTES", 10)
    real, calls = api.try_send, []

    def spy(domain: str, commands: Sequence[NewCommand]) -> dict[UUID, str]:
        calls.append(len(commands))
        return real(domain, commands)

    monkeypatch.setattr(api, "try_send", spy)
    send(file, content=[line(1), line(2)])
    assert calls == [1, 1]


def failing_in_the_second_chunk(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    real, calls = api.try_send, []

    def fail(domain: str, commands: Sequence[NewCommand]) -> dict[UUID, str]:
        calls.append(commands)
        outcomes = real(domain, commands)
        if len(calls) == 2:
            raise error
        return outcomes

    monkeypatch.setattr(api, "try_send", fail)


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            KeyboardInterrupt(),
            130,
            "interrupted after 2 lines; what was sent stays, and the same command again goes on",
        ),
        (OperationalError("gone\n"), 1, "stopped after 2 lines: gone; what was sent stays"),
    ],
)
def test_whatever_stops_it_the_chunks_before_stay_and_the_next_run_goes_on(
    file: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    with monkeypatch.context() as patch:
        failing_in_the_second_chunk(patch, error)
        ran = send(file, content=[line(n) for n in range(1, 6)])
    assert (ran.code, counts(ran), sent()) == (code, ["2", "0", "0"], [1, 2])
    assert words in ran.err
    ran = send(file)
    assert (ran.code, counts(ran), sent()) == (0, ["3", "2", "0"], [1, 2, 3, 4, 5])


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("times", "lines"), [(1, 4), (2, 2)])
def test_ctrl_c_waits_for_the_chunk_and_when_repeated_does_not(
    file: Path, monkeypatch: pytest.MonkeyPatch, times: int, lines: int
) -> None:
    real, calls = api.try_send, []

    def interrupted(domain: str, commands: Sequence[NewCommand]) -> dict[UUID, str]:
        calls.append(commands)
        outcomes = real(domain, commands)
        for _ in range(times if len(calls) == 2 else 0):
            signal.raise_signal(signal.SIGINT)
        return outcomes

    monkeypatch.setattr(api, "try_send", interrupted)
    ran = send(file, content=[line(n) for n in range(1, 8)])
    assert (ran.code, counts(ran)) == (130, [str(lines), "0", "0"])
    assert f"interrupted after {lines} lines" in ran.err
    assert len(sent()) == lines
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.django_db(transaction=True)
def test_a_thread_can_send_a_file_too(file: Path) -> None:
    """Only the main thread may say what Ctrl-C does."""
    ran: list[Ran] = []

    def work() -> None:
        ran.append(send(file, content=[line(1)]))
        connection.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert counts(ran[0]) == ["1", "0", "0"]


@pytest.mark.usefixtures("small_chunks")
def test_a_dry_run_that_is_interrupted_has_sent_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_in_the_second_chunk(monkeypatch, KeyboardInterrupt())
    with transaction.atomic():
        ran = send(file, "--dry-run", content=[line(n) for n in range(1, 6)])
    assert (ran.code, sent()) == (130, [])
    assert "interrupted after 2 lines; nothing was sent" in ran.err


def test_a_file_that_breaks_off_is_sent_as_far_as_it_can_be_read(tmp_path: Path, small_chunks: None) -> None:
    file = tmp_path / "commands.jsonl.gz"
    whole = gzip.compress("".join(f"{line(n, data={'x': os.urandom(3000).hex()})}\n" for n in range(1, 41)).encode())
    file.write_bytes(whole[: len(whole) // 2])
    ran = send(file)
    assert ran.code == 1
    assert "Compressed file ended before the end-of-stream marker" in ran.err
    assert 1 <= len(sent()) < 40


def test_a_terminal_shows_a_bar_and_keeps_the_errors_readable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "CHUNK_LINES", 1)
    ran = send(file, content=[line(1), "{", line(2)], stderr=Terminal())
    assert "[##########" in ran.err
    assert "[##############################] 100 %  3 lines, " in ran.err
    assert f"\r\033[K{file}:2: not JSON" in ran.err.replace("\033[31;1m", "")  # Django's red
    assert ran.err.endswith("/s\n")


def test_standard_input_has_no_end_so_its_bar_is_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, line().encode())
    ran = run("commandbus_send", "orders", "--file", "-", stderr=Terminal())
    assert "\r\033[K1 line, " in ran.err
    assert "%" not in ran.err


def test_elsewhere_one_line_at_the_end_says_how_fast_it_was(file: Path) -> None:
    [said] = send(file, content=[line(1), line(2)]).err.splitlines()
    assert said.startswith("2 lines, ")
    assert said.endswith("/s")


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_verbosity_0_is_silent_but_for_errors(file: Path, stream: type[io.StringIO]) -> None:
    assert send(file, "--verbosity", "0", content=[line(1)], stderr=stream()) == Ran(0, "", "")
    ran = send(file, "--verbosity", "0", content=["{"])
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"{file}:1: not JSON")


def test_an_empty_file_has_nothing_to_send(file: Path) -> None:
    ran = send(file, content=[])
    assert (ran.code, counts(ran)) == (0, ["0", "0", "0"])


@pytest.mark.django_db(transaction=True)
def test_ctrl_c_ends_a_real_process_with_130_and_keeps_the_chunks(file: Path) -> None:
    """The process waits for more of its standard input."""
    process = subprocess.Popen(
        [sys.executable, "-m", "django", "commandbus_send", "orders", "--file", "-"],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write("".join(f"{line(n)}\n" for n in range(1, 1003)))
    process.stdin.flush()
    wait_until(lambda: Command.objects.count() == 1000, "the first chunk")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert "stdin: interrupted after 1,000 lines; what was sent stays" in err
    assert "1,000" in out
    ran = send(file, content=[line(n) for n in range(1, 1003)])
    assert counts(ran) == ["2", "1,000", "0"]


@pytest.mark.django_db(transaction=True)
def test_a_real_process_reads_its_standard_input_and_ends_with_1_after_an_error() -> None:
    wrong = line(2, data=[])
    ran = subprocess.run(
        [sys.executable, "-m", "django", "commandbus_send", "orders", "--file", "-"],
        env=environment(),
        input=f"{line(1)}\n{wrong}\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("stdin:2: ")
    assert sent() == [1]


@pytest.mark.django_db(transaction=True)
def test_a_chunk_wakes_an_idle_worker_and_a_dry_run_does_not(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from commandbus.pgmq import notify

    monkeypatch.setattr(notify, "_nobody_idle_until", {})
    notify.set_idle(["orders"], uuid4(), "default")

    def idle() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM command_bus_idle_worker")
            return int(cursor.fetchone()[0])

    send(file, "--dry-run", content=[line(1)])
    assert idle() == 1
    send(file)
    assert idle() == 0


def test_a_packed_file_that_is_none_is_named(tmp_path: Path) -> None:
    file = tmp_path / "commands.csv.gz"
    file.write_bytes(b"invoice,account")
    ran = send(file)
    assert ran.code == 1
    assert f"{file} cannot be read: Not a gzipped file" in ran.err
