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

from commandbus import ConfigurationError, get_batch, list_batches
from commandbus.ids import derived_id
from commandbus.management.commands import commandbus_spark
from commandbus.models import Command, SparkJob
from commandbus.shell.spark import url_of
from commandbus.spark import cli
from commandbus.spark.connection import Session, parameters_of
from commandbus.spark.jobs import Job
from commandbus.spark.mapping import Input, format_of
from commandbus.spark.progress import Bar, Watch
from tests.spark.shell import CSV, payloads, send


def test_a_csv_file_is_sent_as_a_batch_and_ends_with_a_table(spark: SparkSession, url: str, csv: str) -> None:
    arguments = [csv, "--type", "PlaceOrder", "--id-from", "invoice", "--batch", "Payouts", "--custom-data", '{"a": 1}']
    on_complete = ("--on-complete-type", "Summarize", "--on-complete-data", '{"to": "x"}')
    code, out, err = send(*arguments, *on_complete, "--job-id", "may")
    assert code == 0, err
    assert [line.split() for line in out.splitlines()[:3]] == [["sent", "2"], ["duplicate", "0"], ["rejected", "0"]]
    job = SparkJob.objects.get()
    assert out.splitlines()[-1] == f"batch {job.batch_id}"
    assert err.splitlines()[0] == "job may, 1 file"
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
    arguments = (csv, "--type", "PlaceOrder", "--id-from", "invoice")
    send(*arguments)
    code, out, _ = send(*arguments)
    assert code == 0
    assert "of these by earlier runs" in out
    assert SparkJob.objects.get().run == 2


def test_what_commandbus_send_has_sent_is_the_same_to_spark(spark: SparkSession, url: str, csv: str) -> None:
    call_command("commandbus_send", "orders", "PlaceOrder", file=csv, id_from="invoice", verbosity=0)
    _, out, _ = send(csv, "--type", "PlaceOrder", "--id-from", "invoice")
    assert [line.split() for line in out.splitlines()[:3]] == [["sent", "0"], ["duplicate", "2"], ["rejected", "0"]]


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


def test_a_changed_file_is_another_job(spark: SparkSession, url: str, csv: str) -> None:
    arguments = (csv, "--type", "PlaceOrder", "--id-from", "invoice")
    send(*arguments)
    Path(csv).write_text(CSV + "2026-3,DE-1,1,\n")
    _, out, _ = send(*arguments)
    assert [line.split() for line in out.splitlines()[:2]] == [["sent", "1"], ["duplicate", "2"]]


def test_a_corrected_file_completes_the_batch_that_it_has_begun(spark: SparkSession, url: str, csv: str) -> None:
    lines = ["invoice,reply_to\n", *(f"{number}, \n".replace(" ", "") for number in range(20))]
    Path(csv).write_text("".join(lines) + "20,nowhere\n")
    arguments = [csv, "--type", "PlaceOrder", "--id-from", "invoice", "--batch", "May", "--job-id", "may"]
    with pytest.raises(CommandError, match=r"there is no reply queue 'nowhere'.*\(job may\)"):
        send(*arguments, "--chunk-rows", "1")
    assert 0 < Command.objects.count() < 21
    Path(csv).write_text("".join(lines) + "20,\n")
    assert send(*arguments)[0] == 0
    [batch] = list_batches("orders")
    assert (batch.total_count, batch.is_open) == (21, False)


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


def test_rows_whose_key_is_empty_are_not_one_command(spark: SparkSession, url: str, csv: str, tmp_path: Path) -> None:
    Path(csv).write_text("invoice,account\n,DE-1\n,DE-1\n1,DE-1\n")
    mapping = tmp_path / "map.toml"
    mapping.write_text("command_type = \"'PlaceOrder'\"\nkey = 'invoice'\n")
    query = "SELECT 'PlaceOrder' AS command_type, {} AS key, struct(account) AS data FROM input"
    for arguments, reason in (
        (("--mapping", str(mapping)), "it has no command_id"),
        (("--sql", query.format("invoice")), "its key is empty"),
        (("--sql", query.format("array(invoice)")), "its key is empty"),
    ):
        with pytest.raises(CommandError, match=reason):
            send(csv, *arguments)
        assert not Command.objects.exists()


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


BATCH = ["CSV", "--type", "T", "--id-from", "invoice", "--job-id", "may", "--batch"]


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
        ([*BATCH, ""], "--batch has 0 characters; 1 to 255 are allowed"),
        ([*BATCH, "B" * 256], "--batch has 256 characters; 1 to 255 are allowed"),
        (["CSV", "--type", "T", "--batch", "May"], "a batch needs --job-id: under the same id, a job that was stopped"),
        ([*BATCH, "B", "--on-complete-type", "T" * 256], "--on-complete-type has 256 characters"),
        ([*BATCH, "B", "--on-complete-data", "{}"], "--on-complete-data needs --on-complete-type"),
        (
            [*BATCH, "B", "--on-complete-type", "T", "--on-complete-data", '{"batch": 1}'],
            "--on-complete-data has a key batch",
        ),
        (["CSV", "--type", "T", "--on-complete-type", "X"], "--on-complete-type needs a batch; add --batch"),
        (["CSV", "--type", "T", "--chunk-rows", "0"], "--chunk-rows must be a number from 1 to 100,000, not '0'"),
        (["CSV", "--rejects", "/proc/x/y"], "--rejects /proc/x/y cannot be made"),
        (["CSV", "--master", "nonsense"], "there is no master 'nonsense'; it is local, local[2], local[*], spark://"),
        (["CSV", "--sql", "SELECT 1 AS x FROM input"], "there is a column 'x'; the columns are"),
        (["CSV", "--type", "T", "--option", "x"], "--option 'x' must be NAME=VALUE"),
        ([*BATCH, "B", "--custom-data", "["], "--custom-data is not JSON"),
        ([*BATCH, "B", "--custom-data", "[]"], "--custom-data must be a JSON object"),
        ([*BATCH, "B", "--custom-data", '{"a": NaN}'], "--custom-data is not JSON: there is NaN"),
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


def test_an_error_is_a_line_of_its_own(url: str, csv: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commandbus_spark.Command().run_from_argv(["manage.py", "commandbus_spark", "send", csv, "--domain", "paymnts"])
    told = capsys.readouterr().err
    assert told.startswith("CommandError: domain 'paymnts' is not registered")
    assert told.endswith("\n")


def test_without_django_the_url_comes_from_an_argument_or_the_environment(
    spark: SparkSession, url: str, csv: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["send", csv, "--domain", "orders", "--type", "PlaceOrder", "--id-from", "invoice"]
    assert cli.main([*arguments, "--url", url]) == 0
    assert capsys.readouterr().out.startswith("sent")
    for _ in range(2):
        assert cli.main(arguments) == 1
        assert "where is PostgreSQL? Add --url" in capsys.readouterr().err
        monkeypatch.setenv("COMMANDBUS_URL", "")
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
