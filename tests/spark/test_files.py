"""`manage.py commandbus_spark send` and `python -m commandbus.spark`: files, mappings, progress, errors."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from pyspark.sql import SparkSession

from commandbus import ConfigurationError, get_batch
from commandbus.ids import derived_id
from commandbus.models import Command, SparkJob
from commandbus.shell.spark import url_of
from commandbus.spark import cli
from commandbus.spark.connection import Session, parameters_of
from commandbus.spark.jobs import Job
from commandbus.spark.mapping import Input, format_of
from commandbus.spark.progress import Bar, Watch
from commandbus.transitions import PostgresTransitions

CSV = 'invoice,account,amount,delay\n2026-1,DE-1,10.00,\n2026-2,"D""E",,60\n'


@pytest.fixture
def csv(tmp_path: Path) -> str:
    path = tmp_path / "payouts.csv"
    path.write_text(CSV)
    return str(path)


def send(*arguments: str, domain: str = "orders") -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    try:
        call_command("commandbus_spark", "send", "--domain", domain, *arguments, stdout=out, stderr=err)
    except SystemExit as stop:
        code = stop.code
    return int(code), out.getvalue(), err.getvalue()


def payloads() -> dict[UUID, Any]:
    ids = list(Command.objects.values_list("command_id", flat=True))
    return PostgresTransitions("default").payloads("orders", ids)


def test_a_csv_file_is_sent_as_a_batch_and_ends_with_a_table(spark: SparkSession, url: str, csv: str) -> None:
    arguments = [csv, "--type", "PlaceOrder", "--id-from", "invoice", "--batch", "Payouts", "--custom-data", '{"a": 1}']
    code, out, err = send(*arguments, "--on-complete-type", "Summarize", "--on-complete-data", '{"to": "x"}')
    assert code == 0, err
    assert [line.split() for line in out.splitlines()[:3]] == [["sent", "2"], ["duplicate", "0"], ["rejected", "0"]]
    job = SparkJob.objects.get()
    assert out.splitlines()[-1] == f"batch {job.batch_id}"
    assert err.splitlines()[0] == f"job {job.job_id}, 1 file"
    assert payloads() == {
        derived_id("orders", "PlaceOrder", ["2026-1"]): {"invoice": "2026-1", "account": "DE-1", "amount": "10.00"},
        derived_id("orders", "PlaceOrder", ["2026-2"]): {"invoice": "2026-2", "account": 'D"E', "amount": ""},
    }
    assert job.batch_id is not None
    batch = get_batch("orders", job.batch_id)
    assert batch is not None
    assert batch.on_complete is not None
    assert (batch.name, batch.custom_data, batch.is_open) == ("Payouts", {"a": 1}, False)
    assert batch.on_complete["command_type"] == "Summarize"


def test_the_same_command_again_goes_on_with_its_job(spark: SparkSession, url: str, csv: str) -> None:
    arguments = (csv, "--type", "PlaceOrder", "--id-from", "invoice", "--batch", "Payouts")
    send(*arguments)
    code, out, _ = send(*arguments)
    assert code == 0
    assert "of these by earlier runs" in out
    assert SparkJob.objects.get().run == 2


def test_what_commandbus_send_has_sent_is_the_same_to_spark(spark: SparkSession, url: str, csv: str) -> None:
    call_command("commandbus_send", "orders", "PlaceOrder", file=csv, id_from="invoice", verbosity=0)
    _, out, _ = send(csv, "--type", "PlaceOrder", "--id-from", "invoice")
    assert [line.split() for line in out.splitlines()[:3]] == [["sent", "0"], ["duplicate", "2"], ["rejected", "0"]]


def test_json_lines_keep_their_data_as_they_stand(spark: SparkSession, url: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [
        {"command_id": str(UUID(int=1)), "type": "PlaceOrder", "data": {"a": 1, "b": [{}]}},
        {"command_id": str(UUID(int=2)), "data": {"c": None}, "delay": 5},
    ]
    file.write_text("\n".join(map(json.dumps, lines)).replace('"a": 1,', '"a": 1.00,'))
    code, _, err = send(str(tmp_path / "*.jsonl"), "--type", "Ship")
    assert code == 0, err
    assert payloads() == {UUID(int=1): {"a": 1.0, "b": [{}]}, UUID(int=2): {"c": None}}
    assert Command.objects.get(command_id=UUID(int=2)).command_type == "Ship"


def test_json_lines_without_data_need_somebody_who_says_what_is_what(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    """The type of a field would follow from all lines, and with it the ids and data of each."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"invoice": 7, "x": 1.10}\n{"invoice": "A2"}\n')
    with pytest.raises(CommandError, match="the data of a command are the field data, and there is invoice, x"):
        send(str(file), "--type", "PlaceOrder", "--id-from", "invoice")
    query = "SELECT 'PlaceOrder' AS command_type, invoice AS key, struct(x) AS data FROM input"
    assert send(str(file), "--sql", query)[0] == 0
    assert payloads()[derived_id("orders", "PlaceOrder", ["7"])] == {"x": "1.10"}


def test_csv_is_read_as_it_stands(spark: SparkSession, url: str, tmp_path: Path) -> None:
    folder = tmp_path / "day=007"
    folder.mkdir()
    (folder / "a.csv").write_text('invoice,a note.b\n1,"foo\nbar,baz"\n2,x\n')
    code, _, err = send(str(tmp_path), "--format", "csv", "--type", "PlaceOrder", "--id-from", "invoice")
    assert code == 0, err
    assert sorted(payloads().values(), key=str) == [
        {"invoice": "1", "a note.b": "foo\nbar,baz", "day": "007"},
        {"invoice": "2", "a note.b": "x", "day": "007"},
    ]


@pytest.mark.parametrize(
    "more", [[], ["--sql", "SELECT 'T' AS command_type, invoice AS key, struct(*) AS data FROM input"]]
)
def test_a_quote_that_is_not_closed_takes_no_lines_with_it(
    spark: SparkSession, url: str, csv: str, more: list[str]
) -> None:
    Path(csv).write_text('invoice,amount\n1,"2\n2,3\n3,4\n')
    arguments = [csv, *(more or ["--type", "T", "--id-from", "invoice"])]
    with pytest.raises(CommandError, match=r"payouts.csv: the number of its quotes is odd, so one is not closed"):
        send(*arguments)
    assert not Command.objects.exists()
    assert send(*arguments, "--option", "multiLine=false")[0] == 0
    assert sorted(data["amount"] for data in payloads().values()) == ["2", "3", "4"]


def test_a_header_that_cannot_be_used_is_shown_with_its_file(spark: SparkSession, url: str, csv: str) -> None:
    Path(csv).write_text("invoice,amount,amount\n1,2,3\n")
    with pytest.raises(
        CommandError, match=r"CSV header does not conform.*Header: invoice, amount, amount.*payouts\.csv"
    ):
        send(csv, "--type", "T", "--id-from", "invoice")


def test_rows_whose_key_is_empty_have_no_id(spark: SparkSession, url: str, csv: str) -> None:
    Path(csv).write_text("invoice,amount\n,2\n,2\n1,3\n")
    with pytest.raises(CommandError, match=r"2 of 3 rows cannot be sent; one of them .*: it has no command_id"):
        send(csv, "--type", "T", "--id-from", "invoice")


def test_a_row_without_a_type_is_named_by_what_it_comes_from(spark: SparkSession, url: str, csv: str) -> None:
    Path(csv).write_text("invoice,type\n1,T\n2,\n")
    message = r"one of them \(origin 'payouts\.csv, invoice 2'\): it has no command_type"
    with pytest.raises(CommandError, match=message):
        send(csv, "--id-from", "invoice")
    with pytest.raises(
        CommandError, match=r"row 1 of partition \d \(payouts\.csv, invoice 2\), .*it has no command_type"
    ):
        send(csv, "--id-from", "invoice", "--no-check")


def test_parquet_files_of_different_columns_have_all_of_them(spark: SparkSession, url: str, tmp_path: Path) -> None:
    spark.sql("SELECT '1' AS invoice").write.parquet(str(tmp_path / "p" / "day=1"))
    spark.sql("SELECT '2' AS invoice, 'USD' AS currency").write.parquet(str(tmp_path / "p" / "day=2"))
    assert send(str(tmp_path / "p"), "--format", "parquet", "--type", "T", "--id-from", "invoice")[0] == 0
    assert sorted(payloads().values(), key=str) == [
        {"invoice": "1", "currency": None, "day": "1"},
        {"invoice": "2", "currency": "USD", "day": "2"},
    ]


def test_data_of_json_lines_may_have_keys_that_are_one_column_to_spark(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"command_id": "{UUID(int=1)}", "data": {{"id": 1, "Id": 2, "a": 1, "a": 3}}}}\n')
    assert send(str(file), "--type", "T")[0] == 0
    assert payloads() == {UUID(int=1): {"id": 1, "Id": 2, "a": 3}}


def test_what_can_be_known_is_said_before_spark_starts(
    url: str, csv: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr("commandbus.spark.running.session", start)
    arguments = ["send", csv, "--type", "T", "--id-from", "invoice"]
    for more, message in (
        (["--url", url, "--domain", "paymnts"], "domain 'paymnts' is not registered"),
        (["--url", "postgresql:///x?host=/nowhere", "--domain", "orders"], "PostgreSQL cannot be reached"),
        (["--url", url, "--domain", "orders", "--retry-seconds", "-1"], "--retry-seconds must be 0 to 86,400 seconds"),
    ):
        assert cli.main([*arguments, *more]) == 1
        told = capsys.readouterr().err
        assert told.startswith(message)
        assert told.count("\n") == 1


def test_csv_that_is_not_utf8_is_not_sent(spark: SparkSession, url: str, csv: str) -> None:
    Path(csv).write_bytes("invoice,name\n1,Müller\n2,Möller\n".encode("latin-1"))
    arguments = [csv, "--type", "PlaceOrder", "--id-from", "name"]
    with pytest.raises(CommandError, match="it is not UTF-8; say what it is: --option encoding=ISO-8859-1"):
        send(*arguments)
    with pytest.raises(CommandError, match="it is not UTF-8"):
        send(csv, "--sql", "SELECT 'T' AS command_type, name AS key, struct(name) AS data FROM input")
    assert send(*arguments, "--option", "encoding=ISO-8859-1")[0] == 0
    assert {data["name"] for data in payloads().values()} == {"Müller", "Möller"}


def test_a_file_that_spark_would_leave_out_is_named(spark: SparkSession, url: str, csv: str, tmp_path: Path) -> None:
    hidden = tmp_path / "_b.csv"
    hidden.write_text(CSV)
    with pytest.raises(CommandError, match="Spark leaves out files that begin with _ or a dot"):
        send(csv, str(hidden), "--type", "PlaceOrder", "--id-from", "invoice")


def test_files_in_folders_of_a_folder_are_not_left_out(spark: SparkSession, url: str, csv: str, tmp_path: Path) -> None:
    (tmp_path / "may" / "late").mkdir(parents=True)
    (tmp_path / "may" / "a.csv").write_text(CSV)
    (tmp_path / "may" / "ü %41.csv").write_text(CSV)
    (tmp_path / "may" / "late" / "b c.csv").write_text("invoice,account,amount,delay\n2026-3,DE-1,1,\n")
    (tmp_path / "may" / "late" / "c.json").write_text("of another kind")
    arguments = [str(tmp_path / "m*"), "--format", "csv", "--type", "PlaceOrder", "--id-from", "invoice"]
    with pytest.raises(CommandError, match=r"/may/late/b c\.csv would be left out, .* recursiveFileLookup=true"):
        send(*arguments)
    every_csv = ["--option", "recursiveFileLookup=true", "--option", "pathGlobFilter=*.csv"]
    assert "3 files" in send(*arguments, *every_csv)[2]
    assert Command.objects.count() == 3
    (tmp_path / "may" / "late" / "d.csv").write_text('invoice,account,amount,delay\n2026-4,",1,\n')
    with pytest.raises(CommandError, match=r"/late/d\.csv: the number of its quotes is odd"):
        send(*arguments, *every_csv)


def test_a_folder_may_be_named_by_another_and_called_as_a_column(
    spark: SparkSession, url: str, csv: str, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "value=7").mkdir()
    Path(csv).rename(tmp_path / "value=7" / "a.csv")
    assert send(f"{tmp_path}/here/../value=7", "--format", "csv", "--type", "T", "--id-from", "invoice")[0] == 0
    (tmp_path / "value=7" / "b.csv").write_text('invoice,account,amount,delay\n2026-4,",1,\n')
    with pytest.raises(CommandError, match=r"b\.csv: the number of its quotes is odd"):
        send(str(tmp_path), "--format", "csv", "--type", "T", "--id-from", "invoice")


@pytest.mark.parametrize(
    "line",
    [
        '{"data": {}, "command_id": "1"}{"a": 1}',
        '{"data": {}} , {"a": 1}',
        '{"data": {}} garbage',
        '[{"data": {}}] x',
        '{"data": {}}] x',
    ],
)
@pytest.mark.parametrize(
    "more", [["--type", "T"], ["--sql", "SELECT 'T' AS command_type, command_id, data FROM input"]]
)
def test_a_line_of_json_with_more_than_one_value_is_named(
    spark: SparkSession, url: str, tmp_path: Path, line: str, more: list[str]
) -> None:
    """Spark reads the first, and says nothing of the others."""
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"command_id": "{UUID(int=1)}", "data": {{}}}}\n\n{line}\n')
    with pytest.raises(CommandError, match=r"a\.jsonl: there is something after the first value of the line '"):
        send(str(file), *more)
    assert not Command.objects.exists()


def test_of_json_over_several_lines_nothing_is_left_out(spark: SparkSession, url: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    command = '{"command_id": "%s", "type": "T",\n "data": {"n": 1.10}}'
    both = [command % UUID(int=number) for number in (1, 2)]
    file.write_text("\n".join(both))
    with pytest.raises(CommandError, match=r"a\.json: there is something after its first value, which multiLine=true"):
        send(str(file), "--option", "multiLine=true")
    file.write_text(f"[{','.join(both)}]")
    assert send(str(file), "--option", "multiLine=true")[0] == 0
    assert payloads() == {UUID(int=1): {"n": 1.1}, UUID(int=2): {"n": 1.1}}


@pytest.mark.parametrize("name", ["encoding", "Charset"])
def test_an_encoding_that_would_change_numbers_is_refused(
    spark: SparkSession, url: str, tmp_path: Path, name: str
) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(
        CommandError, match="JSON is read as UTF-8, and --option encoding=UTF-8 would change the digits"
    ):
        send(str(tmp_path / "a.jsonl"), "--type", "T", "--option", f"{name}=UTF-8")


def test_what_is_not_json_to_others_is_read_as_somebody_says(spark: SparkSession, url: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"command_id": "{UUID(int=1)}", "data": {{}}}} // the first\n')
    assert send(str(tmp_path / "a.jsonl"), "--type", "T", "--option", "allowComments=true")[0] == 0


def test_two_quotes_that_are_not_closed_take_no_lines_with_them(spark: SparkSession, url: str, csv: str) -> None:
    Path(csv).write_text('invoice,note\n1," not closed\n2,ok\n3," nor this one\n4,fine\n')
    with pytest.raises(CommandError, match=r"csv: a quote is not closed, .* is not doubled, in line 4 or"):
        send(csv, "--type", "T", "--id-from", "invoice")
    many = "".join(f"{number},x\n" for number in range(30_000))  # more than Spark looks at when it reads the header
    Path(csv).write_text(f'invoice,note\n{many}a,"5" pipe, 6" long"\n')
    with pytest.raises(CommandError, match=r"/payouts\.csv: a quote is not closed, .* in line 30,002 or"):
        send(csv, "--type", "T", "--id-from", "invoice")
    assert not Command.objects.exists()
    Path(csv).write_text('invoice,note\n1,5" or 6"\n2,"a ""b"" c\nd"\n')
    assert send(csv, "--type", "T", "--id-from", "invoice")[0] == 0
    assert sorted(data["note"] for data in payloads().values()) == ['5" or 6"', 'a "b" c\nd']


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        ("invoice,note\n1,a\r\n2,b\r\n", None),
        ("invoice,note\r\n1,a\n2,b\r\n", None),
        ("invoice,note\n1,a\n2,b\r\n", None),
        ('invoice,"no\nte"\r\n1,a\r\n', None),
        ('invoice,note\r\n1,"a\nb"\r\n2,c', ["a\nb", "c"]),
        ('invoice,note\n1,"a\r\nb"\n2,c\n', ["a\r\nb", "c"]),
        ("invoice,note\r\n1,a\r\n2,b\r\n", ["a", "b"]),
    ],
)
def test_line_ends_of_two_kinds_do_not_become_part_of_cells(
    spark: SparkSession, url: str, csv: str, text: str, notes: list[str] | None
) -> None:
    Path(csv).write_bytes(text.encode())
    if notes is None:
        with pytest.raises(CommandError, match=r"payouts\.csv: some of its lines end in .* make them all alike"):
            send(csv, "--type", "T", "--id-from", "invoice")
    else:
        assert send(csv, "--type", "T", "--id-from", "invoice")[0] == 0
        assert sorted(data["note"] for data in payloads().values()) == notes


def test_columns_may_be_called_as_spark_calls_its_own(spark: SparkSession, url: str, csv: str) -> None:
    Path(csv).write_text("invoice,_file,_corrupt_record\n1,a,b\n")
    assert send(csv, "--type", "T", "--id-from", "invoice", "--option", "nullvalue=a")[0] == 0
    assert list(payloads().values()) == [{"invoice": "1", "_file": None, "_corrupt_record": "b"}]


def test_a_mapping_adds_nothing_that_is_not_in_the_lines(spark: SparkSession, url: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "1", "x": "b"}\n')
    (tmp_path / "m.toml").write_text('command_type = "\'T\'"\nkey = "id"\n')
    assert send(str(tmp_path / "a.jsonl"), "--mapping", str(tmp_path / "m.toml"))[0] == 0
    assert list(payloads().values()) == [{"id": "1", "x": "b"}]


def test_a_changed_file_is_another_job(spark: SparkSession, url: str, csv: str) -> None:
    arguments = (csv, "--type", "PlaceOrder", "--id-from", "invoice", "--batch", "Payouts")
    send(*arguments)
    Path(csv).write_text(CSV + "2026-3,DE-1,1,\n")
    _, out, _ = send(*arguments)
    assert [line.split() for line in out.splitlines()[:2]] == [["sent", "1"], ["duplicate", "2"]]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"delay": -1}, "its delay must be from 0 seconds to 100 years"),
        ({"correlation_id": "x"}, "its correlation_id is not a UUID"),
        ({"data": [1]}, "its data must be a JSON object"),
        ({"delay": "soon"}, "its delay is not a number of seconds"),
    ],
)
def test_what_spark_can_see_is_said_before_anything_is_sent(
    spark: SparkSession, url: str, tmp_path: Path, line: dict[str, Any], why: str
) -> None:
    file = tmp_path / "a.jsonl"
    good = {"command_id": str(UUID(int=1)), "data": {}, "delay": 0, "correlation_id": str(UUID(int=9))}
    lines = [good, {**good, "command_id": str(UUID(int=2)), **line}]
    file.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(CommandError, match=why):
        send(str(file), "--type", "T")
    assert not Command.objects.exists()


def test_lines_that_cannot_be_read_stop_it_before_anything_is_sent(spark: SparkSession, url: str, csv: str) -> None:
    Path(csv).write_text(CSV + "2026-3,x\n2026-4,a,b,c\n")
    with pytest.raises(CommandError) as caught:
        send(csv, "--type", "PlaceOrder", "--id-from", "invoice")
    told = str(caught.value)
    assert told.startswith("2 of 4 rows cannot be sent; one of them (origin 'payouts.csv, ")
    assert "the line 2026-3,x'" in told or "invoice 2026-4'" in told
    assert "a line of CSV has as many cells as the header" in told or "its delay is not a number of seconds" in told
    assert not Command.objects.exists()


def test_lines_that_cannot_be_read_are_kept_in_a_folder(
    spark: SparkSession, url: str, csv: str, tmp_path: Path
) -> None:
    Path(csv).write_text(CSV + "2026-3,x\n2026-4,a,b,soon\n")
    folder = tmp_path / "rejects"
    code, out, err = send(csv, "--type", "PlaceOrder", "--id-from", "invoice", "--rejects", str(folder))
    assert code == 1
    assert [line.split() for line in out.splitlines()[:3]] == [["sent", "2"], ["duplicate", "0"], ["rejected", "2"]]
    own = folder / f"rejects-{SparkJob.objects.get().job_id}"
    assert f"what was set aside is in {own}" in err

    def kept_now() -> dict[str, str]:
        lines = [line for file in own.glob("*.json") for line in file.read_text().splitlines()]
        return {json.loads(line)["data"]: json.loads(line)["reason"] for line in lines}

    kept = kept_now()
    assert kept["2026-3,x"].startswith("the line cannot be read; a line of CSV has as many cells as the header")
    assert "its delay is not a number of seconds" in kept.values()
    (own / "_SUCCESS").unlink()  # as if it had been killed while it wrote them
    assert send(csv, "--type", "PlaceOrder", "--id-from", "invoice", "--rejects", str(folder))[0] == 1
    assert kept_now() == kept
    (own / "notes.txt").write_text("mine")
    with pytest.raises(CommandError, match=r"--rejects would make .* anew, and .*/notes\.txt is in it; move it away"):
        send(csv, "--type", "PlaceOrder", "--id-from", "invoice", "--rejects", str(folder))
    assert kept_now() == kept


@pytest.mark.parametrize("job_id", ["..", "a/b %41", "ю" * 60])
def test_every_job_has_a_folder_of_its_own_for_rejects(
    spark: SparkSession, url: str, csv: str, tmp_path: Path, job_id: str
) -> None:
    Path(csv).write_text("invoice\n1\n2,x\n")
    rejects = tmp_path / "rejects"
    rejects.mkdir()
    (rejects / "mine").write_text("mine")
    arguments = ["--type", "T", "--id-from", "invoice", "--job-id", job_id, "--rejects", str(rejects)]
    assert send(csv, *arguments)[0] == 1
    [own] = [path for path in rejects.iterdir() if path.is_dir()]
    assert own.name.startswith("rejects-")
    assert (rejects / "mine").exists()
    assert Path(csv).exists()
    Path(csv).write_text("invoice\n1\n2\n")
    assert send(csv, *arguments)[0] == 0
    assert [file.read_text() for file in own.glob("*.json")] in ([], [""])


def test_rejects_that_are_read_are_not_made_anew(spark: SparkSession, url: str, tmp_path: Path) -> None:
    own = tmp_path / "bad" / "rejects-june"
    own.mkdir(parents=True)
    (own / "part-0.json").write_text(f'{{"command_id": "{UUID(int=1)}", "data": {{}}}}\n')
    arguments = ["--type", "T", "--job-id", "june", "--rejects", str(tmp_path / "bad")]
    with pytest.raises(CommandError, match="rejects-june is read, and --rejects would make it anew"):
        send(str(own / "part-0.json"), *arguments)
    assert (own / "part-0.json").exists()


@pytest.mark.parametrize("files", ["", "/*"])
def test_rejects_are_not_put_where_files_are_read(url: str, csv: str, tmp_path: Path, files: str) -> None:
    with pytest.raises(CommandError, match=r"--rejects .*/bad is in .*, which is read; name another folder"):
        send(
            f"{tmp_path}{files}",
            "--format",
            "csv",
            "--type",
            "T",
            "--id-from",
            "invoice",
            "--rejects",
            str(tmp_path / "bad"),
        )


def test_a_mapping_file_says_what_each_column_is(spark: SparkSession, url: str, tmp_path: Path) -> None:
    spark.sql("SELECT 7 AS id, 'DE-1' AS `the iban`, decimal(10) AS amount").write.parquet(str(tmp_path / "p"))
    mapping = tmp_path / "map.toml"
    mapping.write_text(
        """
        command_type = "'PlaceOrder'"
        key = ["id", "`the iban`"]
        correlation_id = "'00000000-0000-0000-0000-000000000009'"
        delay = "1 + 1"
        [data]
        account = "`the iban`"
        amount = "cast(amount AS string)"
        """
    )
    code, _, err = send(str(tmp_path / "p"), "--format", "parquet", "--mapping", str(mapping), "--no-check")
    assert code == 0, err
    assert payloads() == {derived_id("orders", "PlaceOrder", [7, "DE-1"]): {"account": "DE-1", "amount": "10"}}


def test_a_mapping_file_may_name_all_columns_or_a_text_of_json(
    spark: SparkSession, url: str, csv: str, tmp_path: Path
) -> None:
    mapping = tmp_path / "map.toml"
    mapping.write_text("command_type = \"'PlaceOrder'\"\nkey = 'invoice'\n")
    send(csv, "--mapping", str(mapping))
    assert payloads()[derived_id("orders", "PlaceOrder", ["2026-1"])]["account"] == "DE-1"
    mapping.write_text("command_type = \"'Ship'\"\nkey = 'invoice'\ndata = \"concat('{}', '')\"\n")
    send(csv, "--mapping", str(mapping))
    assert payloads()[derived_id("orders", "Ship", ["2026-1"])] == {}


def test_a_query_says_it_all(spark: SparkSession, url: str, csv: str, tmp_path: Path) -> None:
    query = tmp_path / "q.sql"
    query.write_text("SELECT 'PlaceOrder' AS command_type, invoice AS key, struct(amount) AS data FROM input")
    code, _, err = send(csv, "--sql", f"@{query}")
    assert code == 0, err
    assert payloads()[derived_id("orders", "PlaceOrder", ["2026-1"])] == {"amount": "10.00"}
    Path(csv).write_text(CSV + "2026-3,x\n")
    with pytest.raises(CommandError, match=r"MALFORMED_CSV_RECORD|FAILED_READ_FILE|Malformed"):
        send(csv, "--sql", f"@{query}", "--job-id", "another")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["CSV"], "there is no column type, and no --type for all rows"),
        (["CSV", "--type", "T"], "there is no column command_id, and without ids"),
        (["CSV", "--type", "T", "--id-from", "nix"], "there is no column 'nix', which --id-from names"),
        (["CSV", "--type", "T", "--id-from", ","], "--id-from ',' has an empty name"),
        (["CSV", "--type", "T", "--sql", "SELECT 1"], "type and id come from the SQL query"),
        (["CSV", "--mapping", "m", "--sql", "SELECT 1"], "there are both a mapping file and an SQL query"),
        (["CSV", "--mapping", "/nowhere.toml"], "the mapping file /nowhere.toml cannot be read"),
        (["CSV", "--sql", "@/nowhere.sql"], "--sql @/nowhere.sql cannot be read"),
        (["CSV", "--sql", "SELECT nix FROM input"], "--sql: [UNRESOLVED_COLUMN"),
        (["CSV", "--sql", "SELEC 1"], "--sql: [PARSE_SYNTAX_ERROR] Syntax error at or near 'SELEC'"),
        (["CSV", "--sql", ""], "--sql: [PARSE_EMPTY_STATEMENT]"),
        (["CSV", "--type", "T", "--id-from", "invoice", "--job-id", ""], "--job-id is empty"),
        (["CSV", "--type", "T", "--id-from", "invoice", "--batch", ""], "--batch is empty; name the batch"),
        (["CSV", "--type", "T", "--on-complete-type", "X"], "--on-complete-type needs a batch; add --batch"),
        (["CSV", "--type", "T", "--chunk-rows", "0"], "--chunk-rows must be a number from 1 to 100,000, not '0'"),
        (["CSV", "--rejects", "/proc/x/y"], "--rejects /proc/x/y cannot be made"),
        (["CSV", "--master", "nonsense"], "there is no master 'nonsense'; it is local, local[2], local[*], spark://"),
        (["CSV", "--sql", "SELECT 1 AS x FROM input"], "there is a column 'x'; the columns are"),
        (["CSV", "--type", "T", "--option", "x"], "--option 'x' must be NAME=VALUE"),
        (["CSV", "--type", "T", "--custom-data", "["], "--custom-data is not JSON"),
        (["CSV", "--type", "T", "--custom-data", "[]"], "--custom-data must be a JSON object"),
        (["CSV", "--rejects", "x", "--on-invalid", "fail"], "--rejects sets rows aside"),
        (["/nowhere/x.csv", "--type", "T"], "PATH_NOT_FOUND"),
        (["/nowhere/x"], "say what they hold: --format parquet, csv or json"),
    ],
)
def test_what_is_wrong_is_named(spark: SparkSession, url: str, csv: str, arguments: list[str], message: str) -> None:
    with pytest.raises(CommandError) as caught:
        send(*[csv if argument == "CSV" else argument for argument in arguments])
    assert message in str(caught.value)
    assert not Command.objects.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nix = '1'", "there is 'nix'; it may have"),
        ("command_type = 1", "command_type of the mapping file must be an SQL expression in quotes, not 1"),
        ("key = 'invoice'", "the mapping file has a key and no command_type"),
        ("command_type =", "cannot be read"),
        ('command_type = "\'DebitAccount"', "command_type of the mapping file: [PARSE_SYNTAX_ERROR] Syntax error"),
        ("command_type = \"'T'\"\nkey = 'nix'", "key of the mapping file: [UNRESOLVED_COLUMN.WITH_SUGGESTION]"),
    ],
)
def test_a_wrong_mapping_file_is_named(
    spark: SparkSession, url: str, csv: str, tmp_path: Path, text: str, message: str
) -> None:
    mapping = tmp_path / "map.toml"
    mapping.write_text(text)
    with pytest.raises(CommandError) as caught:
        send(csv, "--mapping", str(mapping))
    assert message in str(caught.value)
    assert "_not_utf8" not in str(caught.value)


def test_beside_data_there_is_nothing_else(spark: SparkSession, url: str, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("type,data,other\nT,{},1\n")
    with pytest.raises(CommandError, match="beside the column data, there is 'other'"):
        send(str(file))


def test_an_unknown_domain_is_named_before_spark_starts(url: str, csv: str) -> None:
    with pytest.raises(CommandError, match="domain 'paymnts' is not registered"):
        send(csv, domain="paymnts")


def test_without_django_the_url_comes_from_an_argument_or_the_environment(
    spark: SparkSession, url: str, csv: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["send", csv, "--domain", "orders", "--type", "PlaceOrder", "--id-from", "invoice"]
    assert cli.main([*arguments, "--url", url]) == 0
    assert capsys.readouterr().out.startswith("sent")
    assert cli.main(arguments) == 1
    assert "where is PostgreSQL? Add --url" in capsys.readouterr().err
    monkeypatch.setenv("COMMANDBUS_URL", f"{url}&password=hunter2")
    assert cli.main(arguments) == 0
    assert cli.main([*arguments, "--url", "postgresql://u:hunter2@h/d"]) == 1
    told = capsys.readouterr().err
    assert "--url holds a password, which others could read" in told
    assert "hunter2" not in told


def test_a_package_for_spark_submit_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["package", str(tmp_path / "p")]) == 0
    assert [Path(line).name for line in capsys.readouterr().out.split()] == ["commandbus.zip", "commandbus_job.py"]


def test_the_database_of_a_domain_is_that_of_the_project(transactional_db: None) -> None:
    assert parameters_of(url_of("orders"))["dbname"] == connections["default"].settings_dict["NAME"]


def test_formats_follow_from_names() -> None:
    assert format_of(Input(files=["a.csv.gz", "b.csv"])) == "csv"
    with pytest.raises(ConfigurationError, match="do not all end in one of"):
        format_of(Input(files=["a.csv", "b.json"]))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def running(**changes: Any) -> Job:
    now = {
        "job_id": "job", "domain": "orders", "status": "RUNNING", "run": 1, "batch_id": None, "rows": 0, "sent": 5,
        "sent_before": 0, "duplicate": 0, "rejected": 0, "handled_rows": 5, "error": None,
    }  # fmt: skip
    return Job(**{**now, **changes})


def test_a_terminal_shows_a_bar() -> None:
    out = Terminal()
    bar = Bar(out, 10)
    bar.show(running())
    bar.end(running(rows=10, sent=10))
    assert "[###############               ]  50 %  5 commands sent" in out.getvalue()
    assert out.getvalue().endswith("/s\n")
    bar.leave()


def test_elsewhere_there_is_a_line_at_the_end() -> None:
    out = io.StringIO()
    bar = Bar(out, None)
    bar.show(running())
    bar.leave()
    bar.end(running())
    assert out.getvalue().startswith("5 commands sent")


def test_a_job_is_watched_while_it_runs(url: str) -> None:
    seen: list[Job] = []
    with Session(parameters_of(url), patience=0) as session:
        watch = Watch(parameters_of(url), "job", seen.append)
        watch.look(session)
        session.call("SELECT commandbus.open_spark_job('job', 'orders')", [])
        watch.look(session)
    assert [(job.status, job.sent) for job in seen] == [("RUNNING", 0)]
    Watch({"host": "/nowhere"}, "job", seen.append).look(Session({"host": "/nowhere"}, patience=0))
