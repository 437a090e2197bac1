"""What Spark reads of a line of JSON is its first value. Here is looked for others, which would be lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from commandbus.exceptions import ConfigurationError
from commandbus.spark.lines import LINE, lines_of, lower

SHOWN = 60
"""Characters of a line."""
AFTER = "\N{SYMBOL FOR END OF TEXT} commandbus"
"""Stands after the text when it is read, and is found there if the text is one value."""


def check(spark: SparkSession, files: Sequence[str], options: Mapping[str, str]) -> None:
    """Raises a ConfigurationError that names the file. A line that cannot be read at all is no error here."""
    given = lower(options)
    encoding = given.get("encoding", given.get("charset"))
    if encoding is not None:
        raise ConfigurationError(
            f"JSON is read as UTF-8, and --option encoding={encoding} would change the digits of its numbers; leave it "
            f"out, and convert what is not UTF-8, for example: iconv -f ISO-8859-1 -t UTF-8"
        )
    if any(name.startswith("allow") for name in given):
        return  # it is another JSON then
    is_whole = given.get("multiline", "").lower() == "true"
    lines = lines_of(spark, files, options, line_end=given.get("linesep"), is_whole=is_whole)
    text = F.ltrim(LINE, F.lit("\ufeff"))
    with_another = F.concat(F.lit("["), text, F.lit(f',"{AFTER}"]'))
    is_one_value = F.coalesce(F.get_json_object(with_another, "$[1]") == AFTER, F.lit(False))
    begins_well = F.json_object_keys(text).isNotNull() | F.json_array_length(text).isNotNull()
    wrong = lines.where(~is_one_value & begins_well).select("file", F.substring(text, 1, SHOWN).alias("beginning"))
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
