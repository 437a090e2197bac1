"""What Spark finds nothing wrong with in CSV, and what would become of it: rows inside of a cell, for example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from commandbus.exceptions import ConfigurationError
from commandbus.spark.lines import LINE, lines_of, lower


def check(spark: SparkSession, files: Sequence[str], options: Mapping[str, str]) -> None:
    """Raises a ConfigurationError that names the file. Whoever says how quotes or lines are written knows better."""
    given = lower(options)
    if given.keys() & {"quote", "escape", "comment", "linesep"} or given.get("multiline", "").lower() == "false":
        return
    if given.get("encoding", given.get("charset", "")).lower().startswith(("utf-16", "utf-32")):
        return
    lines = lines_of(spark, files, options, line_end="\n").select(
        "file",
        "place",
        (F.length(LINE) - F.length(F.replace(F.col(LINE), F.lit('"'), F.lit("")))).alias("quotes"),
        F.col(LINE).endswith("\r").alias("has_cr"),
    )
    found = lines.groupBy("file").agg(
        F.sum("quotes").alias("quotes"), (F.bool_or("has_cr") & ~F.bool_and("has_cr")).alias("is_mixed")
    )
    suspects = found.where("quotes % 2 = 1 OR is_mixed").collect()
    for file in suspects:
        if file["quotes"] % 2:  # two such are found by the reader
            raise ConfigurationError(
                f"{file['file']}: the number of its quotes is odd, so one is not closed, and would take all that "
                f"follows into its cell; close it, or, if no cell has several lines, add --option multiLine=false"
            )
    if suspects:
        _require_one_line_end(lines.where(F.col("file").isin([file["file"] for file in suspects])))


def _require_one_line_end(lines: DataFrame) -> None:
    """Spark takes the first line end of a file for that of all rows, also if it stands inside of quotes.

    Where a row ends in another, that becomes part of a cell, with the next row. The last line may have no end.
    """
    in_order = Window.partitionBy("file").orderBy("place")
    judged = lines.select(
        "file",
        "has_cr",
        F.first("has_cr").over(in_order).alias("first_has_cr"),
        (F.sum("quotes").over(in_order) % 2 == 0).alias("ends_a_row"),
        F.lead(F.lit(True)).over(in_order).alias("is_not_the_last"),
    )
    wrong = judged.where("ends_a_row AND (has_cr OR is_not_the_last) AND has_cr <> first_has_cr").first()
    if wrong is not None:
        raise ConfigurationError(
            f"{wrong['file']}: some of its lines end in \\r\\n and others in \\n, which would become part of cells, "
            f"for the first line says how rows end; make them all alike, for example with dos2unix"
        )
