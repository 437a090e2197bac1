"""From files to the columns that are sent: by the names of their columns, by a mapping file, or by an SQL query."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import unquote

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import StringType, StructField, StructType

from commandbus.exceptions import ConfigurationError
from commandbus.spark import csv_lines, json_lines
from commandbus.spark.ids import derived_id
from commandbus.spark.lines import LINE, WHICH_FILES, lines_of, lower
from commandbus.spark.reasons import reason

Format = Literal["parquet", "csv", "json"]
SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}
PACKED = (".gz", ".bz2", ".zst", ".snappy")
SPECIAL = ("command_id", "command_type", "correlation_id", "reply_to", "delay")
MAPPED = (*SPECIAL, "key", "data")
CORRUPT = "__commandbus_corrupt"
FOREIGN = "__commandbus_not_utf8"
FILE = "__commandbus_file"
OWN = (CORRUPT, FOREIGN, FILE)
"""Columns that are added when files are read, called as nobody else calls theirs."""
SHOWN = 60
"""Characters of a line that cannot be read."""
REPLACED = "\N{REPLACEMENT CHARACTER}"
NOT_UTF8: dict[Format, str] = {
    "csv": "it is not UTF-8; say what it is: --option encoding=ISO-8859-1, for example",
    "json": "it is not UTF-8; convert it: iconv -f ISO-8859-1 -t UTF-8, for example (or it holds U+FFFD, which stands "
    "for what was lost before; remove it)",
}
UNREADABLE = "the line cannot be read; a line of CSV has as many cells as the header, one of JSON is an object"
VIEW = "input"
"""What an SQL query calls the files."""


@dataclass(frozen=True, kw_only=True)
class Input:
    files: Sequence[str]
    format: Format | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    """Of Spark's reader."""
    command_type: str | None = None
    id_from: Sequence[str] = ()
    mapping: str | None = None
    """The path of a mapping file."""
    sql: str | None = None

    def __post_init__(self) -> None:
        if self.mapping is not None and self.sql is not None:
            raise ConfigurationError("there are both a mapping file and an SQL query; use one of them")
        other = "mapping file" if self.mapping is not None else "SQL query" if self.sql is not None else None
        if other is not None and (self.command_type is not None or self.id_from):
            raise ConfigurationError(f"type and id come from the {other}; leave --type and --id-from out")

    def option(self, *names: str) -> str | None:
        """Of Spark's reader, by any of these names in lower case: Spark does not tell it from upper case."""
        return next((value for name, value in lower(self.options).items() if name in names), None)


def commands_of(spark: SparkSession, source: Input, domain: str) -> DataFrame:
    """The commands in files. Raises a ConfigurationError that names the file, the column or the expression."""
    with _blamed(", ".join(source.files)):
        rows = _read(spark, source)
        _require_all_files(rows, source)
    if source.sql is not None:
        rows.createOrReplaceTempView(VIEW)
        with _blamed("--sql"):
            return spark.sql(source.sql)
    if source.mapping is not None:
        with _blamed(f"the mapping file {source.mapping}"):
            return _mapped(rows, _mapping(source.mapping), domain)
    with _blamed(", ".join(source.files)):
        return _by_names(rows, source, domain)


@contextmanager
def _blamed(what: str) -> Iterator[None]:
    """What Spark cannot read is an error of ours that says where it stands."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        own = "|".join(OWN)
        text = re.sub(rf"`({own})`, |, `({own})`", "", reason(error))  # columns that only we know
        raise ConfigurationError(f"{what}: {text}") from error


def format_of(source: Input) -> Format:
    if source.format is not None:
        return source.format
    found = {_suffix(name) for name in source.files}
    if len(found) == 1 and (suffix := found.pop()) in SUFFIXES:
        return SUFFIXES[suffix]
    raise ConfigurationError(
        f"the names of {', '.join(source.files)} do not all end in one of {', '.join(SUFFIXES)}; "
        f"say what they hold: --format parquet, csv or json"
    )


def _suffix(name: str) -> str:
    for packed in PACKED:
        name = name.removesuffix(packed)
    return Path(name).suffix


def _read(spark: SparkSession, source: Input) -> DataFrame:
    """The rows as they are, whatever other rows there are: no type is guessed from the values."""
    kind = format_of(source)
    for name in source.files:
        if Path(name).name.startswith(("_", ".")):
            raise ConfigurationError(f"{name}: Spark leaves out files that begin with _ or a dot; rename it")
    spark.conf.set("spark.sql.sources.partitionColumnTypeInference.enabled", "false")
    reader = spark.read.options(**{**_defaults(kind, source), **source.options})
    files = list(source.files)
    if kind == "parquet":
        return _spread(_named(reader.parquet(*files), source))
    if kind == "csv":
        csv_lines.check(spark, files, source.options)
    else:
        json_lines.check(spark, files, source.options)
    schema = _schema(spark, reader, kind, source)
    # Data are taken as they stand: read as a struct, each row would get the keys of all others.
    fields = [StructField(f.name, StringType()) if f.name == "data" else f for f in schema.fields if f.name != CORRUPT]
    by_names = source.sql is None and source.mapping is None
    if kind == "json" and by_names and "data" not in [f.name for f in fields] and fields:
        fields.append(StructField("data", StringType()))  # Spark leaves out what is {} in every line
    if not fields:
        raise ConfigurationError(
            f"{', '.join(files)}: nothing can be read as {kind}; is it empty?"
            + (" (For a file that is one JSON array: --option multiLine=true)" if kind == "json" else "")
        )
    corrupt = [] if source.sql is not None else [StructField(CORRUPT, StringType())]
    exact = reader.schema(StructType([*fields, *corrupt]))
    rows = _named(exact.csv(files) if kind == "csv" else exact.json(files), source)
    if kind == "csv" and source.option("nullvalue") is None:
        rows = rows.select(*[F.col(name) if name in OWN else _empty_for_null(name) for name in rows.columns])
    if source.option("encoding", "charset") is None:
        rows = _in_utf8(rows, kind, is_query=source.sql is not None)
    return _spread(rows)


def _require_all_files(rows: DataFrame, source: Input) -> None:
    """Spark does not look into the folders of a folder. (On this machine; elsewhere, the number of files is shown.)"""
    read = {unquote(name.removeprefix("file://")) for name in rows.inputFiles()}
    if source.option(*WHICH_FILES) is not None or not all(name.startswith("/") for name in read):
        return
    places = [found for name in source.files for found in glob(re.sub("^file:(//)?", "", name))]
    for folder in [Path(os.path.abspath(place)) for place in places if Path(place).is_dir()]:
        for path in sorted(folder.rglob("*")):
            is_hidden = any(part.startswith(("_", ".")) for part in path.relative_to(folder).parts)
            is_wanted = SUFFIXES.get(_suffix(path.name)) == format_of(source)
            if is_wanted and not is_hidden and path.is_file() and str(path) not in read:
                raise ConfigurationError(
                    f"{path} would be left out, for it is not in the folder {folder} itself; name its own folder, too, "
                    f"or add --option recursiveFileLookup=true; or name the files: '{folder}/*{path.suffix}'"
                )


def _schema(spark: SparkSession, reader: DataFrameReader, kind: Format, source: Input) -> StructType:
    files = list(source.files)
    if kind == "csv":
        return reader.csv(files).schema
    is_whole = (source.option("multiline") or "").lower() == "true"
    if source.sql is not None or source.mapping is not None or is_whole:
        return reader.json(files).schema
    # Only the fields of the lines themselves: what is in their data may have two keys that are one column to Spark.
    lines = lines_of(spark, files, source.options, line_end=source.option("linesep"))
    keys = lines.select(F.explode(F.json_object_keys(LINE)).alias("key"))
    names = sorted(row["key"] for row in keys.distinct().collect())
    return StructType([StructField(name, StringType()) for name in names])


def _named(rows: DataFrame, source: Input) -> DataFrame:
    """With the name of its file beside each row. (A query has the columns of the files, and no others.)"""
    if source.sql is not None or "_metadata" in rows.columns:
        return rows
    return rows.withColumn(FILE, F.col("_metadata.file_name"))


def _empty_for_null(name: str) -> Column:
    return F.coalesce(F.col(_quoted(name)), F.lit("")).alias(name)


def _in_utf8(rows: DataFrame, kind: Format, *, is_query: bool) -> DataFrame:
    """What is not UTF-8 was replaced by a mark when it was read, and different texts by the same."""
    texts = [name for name in rows.columns if isinstance(rows.schema[name].dataType, StringType) and name != FILE]
    if not is_query:
        marked = F.concat_ws("", *[F.col(_quoted(name)) for name in texts]).contains(REPLACED)
        return rows.withColumn(FOREIGN, F.when(marked, F.lit(NOT_UTF8[kind])))
    stop = F.raise_error(F.lit(NOT_UTF8[kind]))
    columns = {name: F.col(_quoted(name)) for name in rows.columns}
    columns |= {name: F.when(columns[name].contains(REPLACED), stop).otherwise(columns[name]) for name in texts}
    return rows.select(*[column.alias(name) for name, column in columns.items()])


def _spread(rows: DataFrame) -> DataFrame:
    """Over all cores: a file that cannot be split is one task, and one connection."""
    cores = rows.sparkSession.sparkContext.defaultParallelism
    return rows.repartition(cores) if rows.rdd.getNumPartitions() < cores else rows


def _defaults(kind: Format, source: Input) -> dict[str, str]:
    """CSV as commandbus_send reads it: all text, quotes doubled, cells that may have several lines.

    A query knows nothing of lines that cannot be read, so one stops it.
    """
    mode = {"mode": "PERMISSIVE"} if source.sql is None else {"mode": "FAILFAST", "columnPruning": "false"}
    common = {**mode, "columnNameOfCorruptRecord": CORRUPT}
    if kind == "csv":
        common |= {"header": "true", "escape": '"', "enforceSchema": "false", "multiLine": "true"}
        is_by_line = (source.option("multiline") or "").lower() == "false"  # a wrong quote ends with its line there
        return common if is_by_line else {**common, "unescapedQuoteHandling": "RAISE_ERROR"}
    return {**common, "primitivesAsString": "true"} if kind == "json" else {"mergeSchema": "true"}


def _by_names(rows: DataFrame, source: Input, domain: str) -> DataFrame:
    if "type" in rows.columns and "command_type" not in rows.columns:
        rows = rows.withColumnRenamed("type", "command_type")
    data_columns = [name for name in rows.columns if name not in (*SPECIAL, *OWN)]
    if format_of(source) == "json" and data_columns != ["data"]:
        others = ", ".join(name for name in data_columns if name != "data")
        raise ConfigurationError(
            f"in JSON lines, the data of a command are the field data, and there is {others}; "
            f"say what is what in a mapping file or a query: only you know which of its values are numbers"
        )
    if "data" in data_columns and len(data_columns) > 1:
        other = next(name for name in data_columns if name != "data")
        raise ConfigurationError(
            f"beside the column data, there is {other!r}; the others are {', '.join(SPECIAL)}; put the rest into data, "
            f"or use a mapping file"
        )
    is_csv = format_of(source) == "csv"
    said = {name: _said(name, is_csv) for name in SPECIAL if name in rows.columns}
    kind = _first(said.get("command_type"), None if source.command_type is None else F.lit(source.command_type))
    if kind is None:
        raise ConfigurationError("there is no column type, and no --type for all rows")
    columns = {**said, "command_type": kind}
    key: dict[str, Column] = {}
    if source.id_from:
        missing = next((name for name in source.id_from if name not in data_columns), None)
        if missing is not None:
            raise ConfigurationError(f"there is no column {missing!r}, which --id-from names; there are {data_columns}")
        key = {name: F.col(_quoted(name)) for name in source.id_from}
        columns["command_id"] = cast(Column, _first(said.get("command_id"), _id_by(domain, kind, key)))
    if "command_id" not in columns:
        raise ConfigurationError(
            "there is no column command_id, and without ids a second run would send every command twice; name the "
            "columns that identify a command: --id-from COLUMN,COLUMN"
        )
    if data_columns == ["data"]:
        return _marked(rows, columns, F.col("data"), key)
    content = F.struct(*[F.col(_quoted(name)) for name in data_columns])
    # Text only, so that Spark writes it as we do; and a line that cannot be read has a place in it.
    return _marked(rows, columns, F.to_json(content, {"ignoreNullFields": "false"}) if is_csv else content, key)


def _id_by(domain: str, command_type: Column, key: Mapping[str, Column]) -> Column:
    """None of cells that are all empty: they say nothing, and all such rows would be one command."""
    some = F.concat_ws("", *[column.cast("string") for column in key.values()]) != ""
    return F.when(some, derived_id(domain, command_type, *key.values()))


def _said(name: str, is_csv: bool) -> Column:
    """What a cell says, if anything."""
    return F.nullif(F.col(name), F.lit("")) if is_csv else F.col(name)


def _first(*columns: Column | None) -> Column | None:
    given = [column for column in columns if column is not None]
    return F.coalesce(*given) if given else None


def _marked(rows: DataFrame, columns: Mapping[str, Column], content: Column, key: Mapping[str, Column]) -> DataFrame:
    """With columns that say where a row comes from, and which rows cannot be read.

    If the data are text, they are the line itself then.
    """
    result, problem = {**columns, "data": content}, F.lit(None).cast("string")
    named = [F.concat(F.lit(f"{name} "), column.cast("string")) for name, column in key.items()]
    if "delay" in columns:
        result["delay"] = columns["delay"].try_cast("double")
        not_a_number = columns["delay"].isNotNull() & result["delay"].isNull()
        problem = F.when(not_a_number, F.lit("its delay is not a number of seconds"))
    if FOREIGN in rows.columns:
        problem = F.coalesce(F.col(FOREIGN), problem)
    if CORRUPT in rows.columns:
        unreadable = F.col(CORRUPT).isNotNull()
        problem = F.when(unreadable, F.lit(UNREADABLE)).otherwise(problem)
        if isinstance(rows.select(content).schema[0].dataType, StringType):
            result["data"] = F.when(unreadable, F.col(CORRUPT)).otherwise(content)
        line = F.concat(F.lit("the line "), F.substring(CORRUPT, 1, SHOWN))
        named = [F.when(unreadable, line).otherwise(F.concat_ws(", ", *named))]
    if FILE in rows.columns:
        named.insert(0, F.col(FILE))
    result["origin"] = F.concat_ws(", ", *named)
    result["problem"] = problem
    return rows.select(*[column.alias(name) for name, column in result.items()])


def _mapping(path: str) -> dict[str, Any]:
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"the mapping file {path} cannot be read: {error}") from error
    if unknown := sorted(found.keys() - set(MAPPED)):
        raise ConfigurationError(f"{path}: there is {unknown[0]!r}; it may have {', '.join(MAPPED)}")
    return found


def _mapped(rows: DataFrame, mapping: Mapping[str, Any], domain: str) -> DataFrame:
    columns = {name: _expression(rows, name, mapping[name]) for name in SPECIAL if name in mapping}
    key: dict[str, Column] = {}
    if "key" in mapping:
        if "command_type" not in columns:
            raise ConfigurationError("the mapping file has a key and no command_type, which the id follows from, too")
        parts = mapping["key"] if isinstance(mapping["key"], list) else [mapping["key"]]
        key = {str(part): _expression(rows, "key", part) for part in parts}
        columns["command_id"] = _id_by(domain, columns["command_type"], key)
    data = mapping.get("data", {name: _quoted(name) for name in rows.columns if name not in OWN})
    if isinstance(data, dict):
        content = F.struct(*[_expression(rows, f"data.{name}", text).alias(name) for name, text in data.items()])
    else:
        content = _expression(rows, "data", data)
    return _marked(rows, columns, content, key)


def _expression(rows: DataFrame, name: str, text: object) -> Column:
    if not isinstance(text, str):
        raise ConfigurationError(f"{name} of the mapping file must be an SQL expression in quotes, not {text!r:.100}")
    column = F.expr(text)
    with _blamed(f"{name} of the mapping file"):
        rows.select(column)  # only now is it read
    return column


def _quoted(name: str) -> str:
    """A column whose name may have dots or spaces."""
    return "`" + name.replace("`", "``") + "`"
