"""`python -m commandbus.spark`, also for `spark-submit`. `manage.py commandbus_spark` takes the same arguments."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commandbus.exceptions import CommandBusError, ConfigurationError
from commandbus.spark.packages import check_packages
from commandbus.text import plain

URL = "COMMANDBUS_URL"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m commandbus.spark", description="commandbus and Spark, without Django"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    sending = actions.add_parser("send", help=SEND, description=SEND)
    sending.add_argument("--url", help=f"where PostgreSQL is, without a password (${URL}, which may have one)")
    add_send_arguments(sending)
    packing = actions.add_parser("package", help=PACKAGE, description=PACKAGE)
    packing.add_argument("folder", type=Path)
    options = vars(parser.parse_args(arguments))
    try:
        if options["action"] == "package":
            return _package(options["folder"])
        check_packages()
        return send(options, _url(options["url"]))
    except CommandBusError as error:
        sys.stderr.write(f"{plain(str(error))}\n")
        return 1


SEND = "send the rows of files as commands, each exactly once; to run it again goes on where it was"
PACKAGE = "write commandbus.zip and commandbus_job.py, for spark-submit, into a folder"


def add_send_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="Parquet, CSV or JSON lines; also a glob or a folder")
    parser.add_argument("--domain", required=True)
    reading = parser.add_argument_group("what the files hold")
    reading.add_argument("--format", choices=["parquet", "csv", "json"], help="(by their names)")
    reading.add_argument("--option", action="append", metavar="NAME=VALUE", help="of Spark's reader; can be repeated")
    reading.add_argument("--type", help="of the rows that name none")
    reading.add_argument("--id-from", metavar="COLUMN[,COLUMN]", help="the columns that identify a command")
    reading.add_argument("--mapping", metavar="FILE", help="TOML: an SQL expression for each column")
    reading.add_argument("--sql", metavar="QUERY", help="a query of the view `input`; @FILE reads it from there")
    reading.add_argument("--no-check", action="store_true", help="do not count and check the rows before they are sent")
    job = parser.add_argument_group("the job")
    job.add_argument("--job-id", help="to use it again goes on with the job (follows from the files)")
    job.add_argument("--batch", metavar="NAME", help="make a batch of the commands; needs --job-id")
    job.add_argument("--custom-data", metavar="JSON", help="kept with the batch")
    job.add_argument("--on-complete-type", metavar="TYPE", help="send a command of this type when the batch completes")
    job.add_argument("--on-complete-data", metavar="JSON", help="its data ({}); it gets a summary of the batch, too")
    job.add_argument("--on-invalid", choices=["fail", "reject"], help="what to do with rows that cannot be sent (fail)")
    job.add_argument("--rejects", metavar="FOLDER", help="write what is set aside there, as JSON; sets rows aside")
    job.add_argument("--atomic", action="store_true", help="send all at once, at the end, or nothing")
    job.add_argument("--chunk-rows", type=int, metavar="N", help="rows in a transaction (2000)")
    job.add_argument("--retry-seconds", type=float, metavar="N", help="wait so long for a PostgreSQL that is away (60)")
    where = parser.add_argument_group("Spark")
    where.add_argument("--master", help="spark://host:7077, yarn, … (local[*])")
    where.add_argument("--conf", action="append", metavar="NAME=VALUE", help="of Spark; can be repeated")


def send(options: dict[str, Any], url: str, out: Any = None, err: Any = None) -> int:
    """What the arguments of `add_send_arguments` ask for."""
    check_packages()
    from commandbus.spark.mapping import Input
    from commandbus.spark.running import SendJob, run

    on_invalid = options["on_invalid"] or ("reject" if options["rejects"] else None)
    if options["rejects"] and on_invalid == "fail":
        raise ConfigurationError("--rejects sets rows aside, and --on-invalid fail does not; leave one of them out")
    if options["job_id"] == "":
        raise ConfigurationError("--job-id is empty; name the job, or leave it out: it follows from the files then")
    job = SendJob(
        source=Input(
            files=options["files"],
            format=options["format"],
            options=_pairs("--option", options["option"]),
            command_type=options["type"],
            id_from=_names(options["id_from"]),
            mapping=options["mapping"],
            sql=_text(options["sql"]),
        ),
        url=url,
        domain=options["domain"],
        options={
            "job_id": options["job_id"],
            "batch_name": options["batch"],
            "custom_data": options["custom_data"],
            "on_complete_type": options["on_complete_type"],
            "on_complete_data": options["on_complete_data"],
            "on_invalid": on_invalid,
            "atomic": options["atomic"],
            "chunk_rows": options["chunk_rows"],
            "retry_seconds": options["retry_seconds"],
        },
        rejects=options["rejects"],
        check=not options["no_check"],
        master=options["master"],
        config=_pairs("--conf", options["conf"]),
    )
    return run(job, out or sys.stdout, err or sys.stderr)


def _url(given: str | None) -> str:
    """A password among the arguments would be in the list of processes, and Spark would write it into its event log."""
    from commandbus.spark.connection import parameters_of

    if given is None:
        if not os.environ.get(URL):
            raise ConfigurationError(f"where is PostgreSQL? Add --url postgresql://user@host/database, or set ${URL}")
        return os.environ[URL]
    if any("password" in name for name in parameters_of(given)):
        raise ConfigurationError(
            f"--url holds a password, which others could read; leave it out and put it into $PGPASSWORD or ~/.pgpass, "
            f"or put the whole url into ${URL}"
        )
    return given


def _package(folder: Path) -> int:
    from commandbus.spark.package import build_package

    for path in build_package(folder):
        sys.stdout.write(f"{path}\n")
    return 0


def _pairs(option: str, texts: list[str] | None) -> dict[str, str]:
    for text in texts or ():
        if "=" not in text:
            raise ConfigurationError(f"{option} {text!r} must be NAME=VALUE")
    return dict(text.split("=", 1) for text in texts or ())


def _names(text: str | None) -> tuple[str, ...]:
    names = () if text is None else tuple(name.strip() for name in text.split(","))
    if "" in names:
        raise ConfigurationError(f"--id-from {text!r} has an empty name; use COLUMN or COLUMN,COLUMN")
    return names


def _text(given: str | None) -> str | None:
    if given is None or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--sql {given} cannot be read: {error}") from error
