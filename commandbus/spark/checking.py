"""What can be found wrong with a DataFrame before anything is sent."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import StringType, StructType

from commandbus.exceptions import ConfigurationError, InvalidCommandError
from commandbus.spark.lineage import unstable_functions

UUID_PATTERN = "(?i)^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
CONTENT = ("command_type", "command_id", "key", "data")
LONGEST_DELAY = 100 * 365.25 * 24 * 3600


def count_rows(df: DataFrame, *, all_right: bool) -> int:
    """How many rows there are. If they must be `all_right`, the first that is not is an InvalidCommandError."""
    if not all_right:
        return df.count()
    problem = _problem(df.schema)
    names = ("origin", "command_id", "command_type")
    shown = [F.col(name).cast("string").alias(name) for name in names if name in df.columns]
    wrong = F.when(problem.isNotNull(), F.struct(problem.alias("problem"), *shown))
    [row] = df.agg(
        F.count(F.lit(1)).alias("rows"),
        F.count_if(problem.isNotNull()).alias("wrong"),
        F.first(wrong, ignorenulls=True).alias("first"),
    ).collect()
    if row["wrong"]:
        first = row["first"].asDict()
        why = first.pop("problem")
        named = [f"{name} {value!r:.300}" for name, value in first.items() if value is not None]
        which = ", ".join(named) or "without an id"
        raise InvalidCommandError(
            f"{row['wrong']:,} of {row['rows']:,} rows cannot be sent; one of them ({which}): {why}. "
            f"Nothing was sent: correct them, or set such rows aside with onInvalid=reject (in the shell: --rejects "
            f"FOLDER)"
        )
    return int(row["rows"])


def _problem(schema: StructType) -> Column:
    """What Spark can tell of it. PostgreSQL is stricter, and has the last word."""
    names = schema.fieldNames()
    rules: list[tuple[Column, str]] = []
    if "command_type" in names:
        length = F.length("command_type")
        rules += [
            (F.col("command_type").isNull(), "it has no command_type"),
            ((length < 1) | (length > 255), "its command_type must have 1 to 255 characters"),
        ]
    if "command_id" in names:  # which may follow from the type
        rules += [
            (F.col("command_id").isNull(), "it has no command_id"),
            (~F.col("command_id").rlike(UUID_PATTERN), "its command_id is not a UUID"),
        ]
    if "key" in names:
        rules.append((F.col("key").isNull(), "its key is null"))
        if isinstance(schema["key"].dataType, StringType):
            rules.append((F.col("key") == "", "its key is empty"))
    rules.append((F.col("data").isNull(), "it has no data; use {} if there are none"))
    if isinstance(schema["data"].dataType, StringType):
        rules.append((F.get_json_object("data", "$").isNull(), "its data cannot be read as JSON"))
        rules.append((~F.col("data").rlike(r"^\s*\{"), "its data must be a JSON object"))
    if "correlation_id" in names:
        rules.append((~F.col("correlation_id").rlike(UUID_PATTERN), "its correlation_id is not a UUID"))
    if "delay" in names:
        seconds = F.col("delay").cast("double")
        outside = (seconds < 0) | (seconds > LONGEST_DELAY) | F.isnan(seconds)
        rules.append((outside, "its delay must be from 0 seconds to 100 years"))
    problem = F.lit(None).cast("string")
    for condition, text in reversed(rules):
        problem = F.when(condition, F.lit(text)).otherwise(problem)
    if "problem" in names:
        problem = F.coalesce(F.nullif(F.col("problem"), F.lit("")), problem)
    return problem


def require_stable(df: DataFrame) -> None:
    """Raise a ConfigurationError if ids or data come out differently when Spark computes them again.

    Spark repeats what has failed, and you repeat what was killed. Ids from rand(), uuid(), the time or
    monotonically_increasing_id() would make other commands of the same rows; other data under one id is a conflict.
    """
    if not hasattr(df, "_jdf"):
        return  # Spark Connect does not show its plans
    names = unstable_functions(df.select(*[name for name in CONTENT if name in df.columns]))
    if names:
        raise ConfigurationError(
            f"command_id, key, command_type and data must be the same whenever they are computed, and {names[0]}() is "
            f"not: a repeated task would send other commands; derive the ids from what the rows hold, for example with "
            f"commandbus.spark.derived_id"
        )
