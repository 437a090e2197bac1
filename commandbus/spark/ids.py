"""Ids of commands as columns, computed by Spark itself, and equal to what Python computes."""

from __future__ import annotations

from uuid import NAMESPACE_URL, UUID
from uuid import uuid5 as python_uuid5

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f", "\b": "\\b"}
CONTROLS = {chr(code): f"\\u{code:04x}" for code in range(0x20) if chr(code) not in ESCAPES}


def uuid5(namespace: UUID, name: Column | str) -> Column:
    """`uuid.uuid5(namespace, name)` of a column of text, as text. Null of null."""
    return _uuid5(F.unhex(F.lit(namespace.hex)), _column(name).cast("string"))


def derived_id(domain: str, command_type: Column | str, *key: Column | str) -> Column:
    """`commandbus.ids.derived_id` of the columns that identify a command: text, whole numbers, true or false.

    `command_type`: a type, or a column of types. Null, if a part of the key is null.
    """
    if isinstance(command_type, str):
        space = F.unhex(F.lit(python_uuid5(NAMESPACE_URL, f"commandbus:{domain}/{command_type}").hex))
    else:
        name = F.concat(F.lit(f"commandbus:{domain}/"), command_type)
        space = F.unhex(F.replace(uuid5(NAMESPACE_URL, name), F.lit("-")))
    parts = [_json(_column(part)) for part in key]
    commas = [part for each in parts for part in (F.lit(","), each)][1:]
    return _uuid5(space, F.concat(F.lit("["), *commas, F.lit("]")))


def _uuid5(namespace: Column, text: Column) -> Column:
    digest = F.sha1(F.concat(namespace, F.encode(text, "UTF-8")))
    variant = F.substring(F.lit("89ab"), F.conv(F.substring(digest, 17, 1), 16, 10).cast("int") % 4 + 1, F.lit(1))
    return F.concat(
        F.substring(digest, 1, 8),
        F.lit("-"),
        F.substring(digest, 9, 4),
        F.lit("-5"),
        F.substring(digest, 14, 3),
        F.lit("-"),
        variant,
        F.substring(digest, 18, 3),
        F.lit("-"),
        F.substring(digest, 21, 12),
    )


def _json(part: Column) -> Column:
    """A part of a key as Python's json writes it. Other types are an error: Java and Python write them differently."""
    kind = F.typeof(part)
    return (
        F.when(kind == "string", _quoted(part.cast("string")))
        .when(kind.isin("tinyint", "smallint", "int", "bigint", "boolean"), part.cast("string"))
        .otherwise(
            F.raise_error(
                F.concat(
                    F.lit("a key of the type "),
                    kind,
                    F.lit(" has no text that is the same everywhere; cast it to string"),
                )
            )
        )
    )


def _quoted(text: Column) -> Column:
    escaped = text
    for character, escape in {**ESCAPES, **CONTROLS}.items():  # the backslash first
        escaped = F.replace(escaped, F.lit(character), F.lit(escape))
    has_some = text.rlike(r'[\x00-\x1f"\\]')
    return F.concat(F.lit('"'), F.when(has_some, escaped).otherwise(text), F.lit('"'))


def _column(name: Column | str) -> Column:
    return F.col(name) if isinstance(name, str) else name
