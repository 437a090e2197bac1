"""What files hold: as it stands, all of it, or an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.core.management import CommandError
from pyspark.sql import SparkSession

from commandbus.ids import derived_id
from commandbus.models import Command
from tests.spark.shell import CSV, payloads, send


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


@pytest.mark.parametrize(
    "more", [["--type", "T"], ["--sql", "SELECT 'T' AS command_type, command_id, data FROM input"]]
)
def test_a_line_of_json_that_is_an_array_is_named(
    spark: SparkSession, url: str, tmp_path: Path, more: list[str]
) -> None:
    """The fields of commands are those of lines that are objects: the delay of this one would be lost."""
    file = tmp_path / "a.jsonl"
    first, second = (f'"command_id": "{UUID(int=number)}", "data": {{}}' for number in (1, 2))
    file.write_text(f'{{{first}}}\n [{{{second}, "delay": 60}}]\n')
    with pytest.raises(CommandError, match=r"a\.jsonl: the line ' ?\[\{.* is an array; .* --option multiLine=true"):
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
