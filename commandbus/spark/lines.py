"""Files as the lines that they are made of, for what Spark does not say of them when it reads CSV or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

LINE = "__commandbus_line"
WHICH_FILES = {
    "recursivefilelookup",
    "pathglobfilter",
    "modifiedbefore",
    "modifiedafter",
    "ignoremissingfiles",
    "ignorecorruptfiles",
}
"""Options of Spark's reader that say which files are read. The same are looked at."""


def lower(options: Mapping[str, str]) -> dict[str, str]:
    """Options by names in lower case, for Spark does not tell it from upper case."""
    return {name.lower(): value for name, value in options.items()}


def lines_of(
    spark: SparkSession,
    files: Sequence[str],
    options: Mapping[str, str],
    *,
    line_end: str | None = None,
    is_whole: bool = False,
) -> DataFrame:
    """Columns: LINE, the file, and the place, which tells the lines of a file in their order.

    `line_end`: of all files, instead of what each has. `is_whole`: each file is one line.
    """
    which = {name: value for name, value in lower(options).items() if name in WHICH_FILES}
    # A name of our own: a folder may be called value=….
    read = spark.read.options(**which).schema(f"{LINE} string").text(list(files), wholetext=is_whole, lineSep=line_end)
    place = F.struct("_metadata.file_block_start", F.monotonically_increasing_id())
    return read.select(LINE, F.col("_metadata.file_path").alias("file"), place.alias("place"))
