"""From the columns of a DataFrame to what commandbus.spark_send takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    FractionalType,
    IntegralType,
    MapType,
    NullType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from commandbus.exceptions import ConfigurationError
from commandbus.ids import derived_id
from commandbus.spark.json_text import Encode, encoder_of, in_utc

COLUMNS = ("command_type", "command_id", "key", "data", "correlation_id", "reply_to", "delay", "problem", "origin")
JSON_TYPES = (
    StringType,
    BooleanType,
    IntegralType,
    FractionalType,
    DateType,
    TimestampType,
    TimestampNTZType,
    BinaryType,
    NullType,
)
CHUNK_BYTES = 4 * 1024 * 1024
"""Of data that are sent in a transaction: so the memory that a task needs is bounded, also with large rows."""


def check_columns(schema: StructType, command_type: str | None) -> None:
    """Raises a ConfigurationError that names the column and the remedy, before anything is read."""
    names = schema.fieldNames()
    for name in names:
        if name not in COLUMNS:
            raise ConfigurationError(
                f"there is a column {name!r}; the columns are {', '.join(COLUMNS)}; put the rest into data, "
                f"for example with struct(…) AS data"
            )
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigurationError(f"there are two columns {twice[0]!r}; drop one")
    if "command_type" not in names and command_type is None:
        raise ConfigurationError(
            "there is no column command_type; add it (or, for a DataFrame, the option commandType for all rows)"
        )
    if "command_type" in names and command_type is not None:
        raise ConfigurationError("there are both a column command_type and the option commandType; use one of them")
    if "data" not in names:
        raise ConfigurationError("there is no column data; add it, for example with struct(…) AS data")
    if ("command_id" in names) == ("key" in names):
        raise ConfigurationError(
            "there must be either a column command_id, or a column key that the id follows from; without one, a second "
            "run would send every command twice"
        )
    for name in names:
        _check_type(name, schema[name].dataType)
    _check_data(schema["data"].dataType)


def _check_data(kind: DataType, path: str = "data") -> None:
    """Also what is inside of it must be something that JSON can hold."""
    if isinstance(kind, StructType):
        for part in kind:
            _check_data(part.dataType, f"{path}.{part.name}")
    elif isinstance(kind, ArrayType):
        _check_data(kind.elementType, f"{path}[]")
    elif isinstance(kind, MapType):
        if not isinstance(kind.keyType, StringType):
            raise ConfigurationError(
                f"{path} is a map with keys of type {kind.keyType.simpleString()}; cast them to text"
            )
        _check_data(kind.valueType, f"{path}.value")
    elif not isinstance(kind, JSON_TYPES):
        raise ConfigurationError(
            f"{path} has the type {kind.simpleString()}, which JSON cannot hold; cast it to text, or use to_json(…)"
        )


def _check_type(name: str, kind: DataType) -> None:
    wanted = {
        "data": "a string of JSON, a struct or a map",
        "key": "text, a whole number, true or false, or a struct or array of these",
        "delay": "a number of seconds",
    }.get(name, "a string")
    right = {"data": _is_data, "key": _is_key, "delay": _is_number}.get(name, _is_text)
    if not right(kind):
        raise ConfigurationError(f"the column {name} has the type {kind.simpleString()}; it must be {wanted}")


def _is_text(kind: DataType) -> bool:
    return isinstance(kind, StringType | NullType)


def _is_number(kind: DataType) -> bool:
    return isinstance(kind, IntegralType | FractionalType | DecimalType | NullType)


def _is_data(kind: DataType) -> bool:
    return isinstance(kind, StringType | StructType) or (
        isinstance(kind, MapType) and isinstance(kind.keyType, StringType)
    )


def _is_key(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return all(_is_key_part(part.dataType) for part in kind)
    return _is_key_part(kind.elementType if isinstance(kind, ArrayType) else kind)


def _is_key_part(kind: DataType) -> bool:
    return isinstance(kind, StringType | IntegralType | BooleanType)


@dataclass(slots=True)
class Chunk:
    """Rows as the columns of a call. `first`: the number of its first row in the task, from 1 on."""

    first: int
    command_ids: list[str | None] = field(default_factory=list)
    command_types: list[str | None] = field(default_factory=list)
    data: list[str | None] = field(default_factory=list)
    reply_to: list[str | None] | None = None
    correlation_ids: list[str | None] | None = None
    delays: list[float | None] | None = None
    problems: list[str | None] | None = None
    origins: pa.Array | None = None

    def origin(self, number: int) -> str | None:
        """Where the row of this number, from 0 on, comes from, if its DataFrame says so."""
        return None if self.origins is None else _value(self.origins[number], 0, [None])

    def __len__(self) -> int:
        return len(self.command_ids)


class Rows:
    """Makes chunks of what Spark hands to a task. Nothing of a chunk is kept when the next is asked for."""

    def __init__(self, domain: str, command_type: str | None, chunk_rows: int) -> None:
        self._domain = domain
        self._command_type = command_type
        self._chunk_rows = chunk_rows
        self._encode: Encode | None = None
        self._next = 1

    def chunks(self, batch: pa.RecordBatch) -> Iterator[Chunk]:
        for start, size in self._pieces(batch):
            piece = batch.slice(start, size)
            chunk = self._chunk(piece)
            self._next += size
            yield chunk

    def _pieces(self, batch: pa.RecordBatch) -> Iterator[tuple[int, int]]:
        """Where to cut: after so many rows, and where they would take too much memory on the average."""
        per_row = max(1, batch.get_total_buffer_size() // max(1, batch.num_rows))
        size = max(1, min(self._chunk_rows, CHUNK_BYTES // per_row))
        for start in range(0, batch.num_rows, size):
            yield start, min(size, batch.num_rows - start)

    def _chunk(self, batch: pa.RecordBatch) -> Chunk:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        count = batch.num_rows
        problems: list[str | None] = [None] * count
        for number, problem in enumerate(_listed(columns, "problem", problems) or ()):
            problems[number] = problem or problems[number]
        types = _listed(columns, "command_type", problems) or [self._command_type] * count
        data = self._data(columns["data"], problems)
        chunk = Chunk(
            self._next,
            _listed(columns, "command_id", problems) or self._ids(columns["key"], types, problems),
            types,
            data,
            _queues(_listed(columns, "reply_to", problems)),
            _said(_listed(columns, "correlation_id", problems)),
            _said(_floats(_listed(columns, "delay", problems))),
        )
        texts = (chunk.command_ids, chunk.command_types, chunk.data, chunk.reply_to, chunk.correlation_ids, problems)
        for column in texts:
            _without_zeros(column, problems)
        chunk.problems = _said(problems)
        chunk.origins = columns.get("origin")
        return chunk

    def _data(self, column: pa.Array, problems: list[str | None]) -> list[str | None]:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            return _values(column, problems)
        if self._encode is None:
            self._encode = encoder_of(column.type)
        texts: list[str | None] = []
        # Spark hands out moments in the session's zone, which Python may not know, or in which they may have no date.
        for number, value in enumerate(_values(column.cast(in_utc(column.type)), problems)):
            try:
                texts.append(None if value is None else self._encode(value))
            except ValueError as error:
                texts.append(None)
                problems[number] = str(error)
        return texts

    def _ids(self, column: pa.Array, types: list[Any], problems: list[str | None]) -> list[str | None]:
        ids: list[str | None] = []
        for number, (key, command_type) in enumerate(zip(_values(column, problems), types, strict=True)):
            values = list(key.values()) if isinstance(key, dict) else key if isinstance(key, list) else [key]
            if None in values or set(values) <= {""}:
                problems[number] = problems[number] or "its key is empty, or a part of it null; a command needs an id"
                ids.append(None)
            elif command_type is None:
                ids.append(None)  # that it has no type is said later
            else:
                ids.append(str(derived_id(self._domain, command_type, values)))
        return ids


def _listed(columns: dict[str, pa.Array], name: str, problems: list[str | None]) -> list[Any] | None:
    return _values(columns[name], problems) if name in columns else None


def _values(column: pa.Array, problems: list[str | None]) -> list[Any]:
    """A value that Python cannot hold is a problem of its row: text that is not UTF-8, a date after the year 9999."""
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):
        return [_value(column[number], number, problems) for number in range(len(column))]


def _value(scalar: pa.Scalar, number: int, problems: list[str | None]) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        problems[number] = f"it holds a value that cannot be read: {error}"
        return None


def _floats(values: list[Any] | None) -> list[Any] | None:
    return None if values is None else [None if value is None else float(value) for value in values]


def _queues(names: list[Any] | None) -> list[Any] | None:
    """The seed writes `payments.replies`; the queue is called payments__replies."""
    return _said(None if names is None else [None if name is None else name.replace(".", "__") for name in names])


def _said(values: list[Any] | None) -> list[Any] | None:
    """Nothing, where it says nothing of any row."""
    return values if values is not None and any(value is not None for value in values) else None


def _without_zeros(texts: list[str | None] | None, problems: list[str | None]) -> None:
    """PostgreSQL takes no text with the character 0, not even to say so."""
    for number, text in enumerate(texts or ()):
        if text is not None and "\x00" in text:
            assert texts is not None  # noqa: S101 - it is what we walk
            texts[number] = text.replace("\x00", "\\u0000")
            problems[number] = "it holds the character \\u0000, which PostgreSQL cannot store; remove it"
