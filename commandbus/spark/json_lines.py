"""What Spark reads of a line of JSON is its first value. Here is looked for others, which would be lost.

And for arrays: the fields that commands have are those of lines that are objects, and others would be lost, too.
"""

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
    is_array = F.json_array_length(text).isNotNull()
    begins_well = F.json_object_keys(text).isNotNull() | is_array
    wrong = (~is_one_value if is_whole else ~is_one_value | is_array) & begins_well  # what is seldom true first
    shown = lines.where(wrong).select("file", is_one_value.alias("is_one"), F.substring(text, 1, SHOWN).alias("line"))
    if (first := shown.first()) is None:
        return
    if is_whole:
        raise ConfigurationError(
            f"{first['file']}: there is something after its first value, which multiLine=true would leave out; make "
            f"the file one array, or write one object in each line, and leave that option out then"
        )
    if first["is_one"]:
        raise ConfigurationError(
            f"{first['file']}: the line {first['line']!r} is an array; write one object in each line, or, if the file "
            f"is one array, add --option multiLine=true"
        )
    raise ConfigurationError(
        f"{first['file']}: there is something after the first value of the line {first['line']!r}; write one object in "
        f"each line"
    )
