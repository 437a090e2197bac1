"""What Spark reads of a line of JSON is its first value. Here is looked for others, which would be lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from commandbus.exceptions import ConfigurationError

SHOWN = 60
"""Characters of a line."""


def check(spark: SparkSession, files: Sequence[str], options: Mapping[str, str]) -> None:
    """Raises a ConfigurationError that names the file. A line that cannot be read at all is no error here."""
    given = {name.lower(): value for name, value in options.items()}
    encoding = given.get("encoding", given.get("charset"))
    if encoding is not None:
        raise ConfigurationError(
            f"JSON is read as UTF-8, and --option encoding={encoding} would change the digits of its numbers; leave it "
            f"out, and convert what is not UTF-8, for example: iconv -f ISO-8859-1 -t UTF-8"
        )
    if any(name.startswith("allow") for name in given):
        return  # it is another JSON then
    is_whole = given.get("multiline", "false").lower() == "true"
    values = spark.read.text(list(files), wholetext=is_whole, lineSep=given.get("linesep"))
    text = F.regexp_replace("value", "^\ufeff", "")
    begins_well = F.json_object_keys(text).isNotNull() | F.json_array_length(text).isNotNull()
    wrong = values.where(begins_well & ~F.coalesce(_is_one_value(text), F.lit(False))).select(
        F.col("_metadata.file_path").alias("file"), F.substring(text, 1, SHOWN).alias("beginning")
    )
    if (first := wrong.first()) is None:
        return
    if is_whole:
        raise ConfigurationError(
            f"{first['file']}: there is something after its first value, which multiLine=true would leave out; make "
            f"the file one array, or write one object in each line, and leave that option out then"
        )
    raise ConfigurationError(
        f"{first['file']}: there is something after the first value of the line {first['beginning']!r}; write one "
        f"object in each line"
    )


def _is_one_value(text: Column) -> Column:
    """Spark's functions, too, read a first value only. So the text is put between others that have to be found."""
    alone = F.json_array_length(F.concat(F.lit("["), text, F.lit("]"))) == 1
    last = F.get_json_object(F.concat(F.lit("[["), text, F.lit('],"the end"]')), "$[1]")
    return alone & (last == "the end")
