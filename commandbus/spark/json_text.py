"""Values of Spark's columns as JSON text.

Text follows from the value alone: not from the session's time zone, for example. So the same row is the same command in
every run.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyarrow import types

from commandbus.exceptions import ConfigurationError

Encode = Callable[[Any], str]
_text = json.encoder.encode_basestring  # with quotes; no escapes but those that JSON demands


def in_utc(kind: pa.DataType) -> pa.DataType:
    """The same type, with UTC for any other time zone in it."""
    if types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    if types.is_struct(kind):
        return pa.struct([part.with_type(in_utc(part.type)) for part in kind])
    if types.is_map(kind):
        return pa.map_(kind.key_field, kind.item_field.with_type(in_utc(kind.item_type)))
    if types.is_list(kind) or types.is_large_list(kind):
        make = pa.list_ if types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(in_utc(kind.value_type)))
    return kind


def encoder_of(kind: pa.DataType, path: str = "data") -> Encode:
    """What makes JSON text of a value of this Arrow type. Raises a ConfigurationError if nothing does."""
    encode = _encoder(kind, path)

    def encode_or_null(value: Any) -> str:
        return "null" if value is None else encode(value)

    return encode_or_null


def _encoder(kind: pa.DataType, path: str) -> Encode:
    if types.is_string(kind) or types.is_large_string(kind):
        return _text
    if types.is_boolean(kind):
        return lambda value: "true" if value else "false"
    if types.is_integer(kind):
        return str
    if types.is_float32(kind):
        return lambda value: _number(_short(value), path)
    if types.is_floating(kind):
        return lambda value: _number(value, path)
    if types.is_decimal(kind):
        return _decimal
    if types.is_timestamp(kind):
        return _timestamp
    if types.is_date(kind):
        return _date
    if types.is_binary(kind) or types.is_large_binary(kind):
        return lambda value: f'"{base64.b64encode(value).decode()}"'
    if types.is_null(kind):
        return lambda value: "null"
    return _container(kind, path)


def _container(kind: pa.DataType, path: str) -> Encode:
    if types.is_struct(kind):
        parts = [(f.name, f"{_text(f.name)}:", encoder_of(f.type, f"{path}.{f.name}")) for f in kind]
        return lambda value: _object(key + encode(value[name]) for name, key, encode in parts)
    if types.is_map(kind):
        if not (types.is_string(kind.key_type) or types.is_large_string(kind.key_type)):
            raise ConfigurationError(f"{path} is a map with keys of type {kind.key_type}; cast them to text")
        item = encoder_of(kind.item_type, f"{path}.value")
        return lambda value: _object(f"{_text(key)}:{item(each)}" for key, each in value)
    if types.is_list(kind) or types.is_large_list(kind):
        element = encoder_of(kind.value_type, f"{path}[]")
        return lambda value: f"[{','.join(map(element, value))}]"
    raise ConfigurationError(f"{path} has the type {kind}, which JSON cannot hold; cast it to text first")


def _object(parts: Iterable[str]) -> str:
    return f"{{{','.join(parts)}}}"


def _short(value: float) -> float:
    """The number of the fewest digits that is this one in 32 bits: 0.1, and not 0.10000000149011612."""
    for digits in (6, 7, 8):
        short = float(f"{value:.{digits}g}")
        if struct.unpack("f", struct.pack("f", short)) == (value,):
            return short
    return value


def _number(value: float, path: str) -> str:
    if not math.isfinite(value):
        raise ValueError(f"{path} is {value}, which JSON cannot hold; use a number, null or text")
    return repr(value)


def _decimal(value: Decimal) -> str:
    return format(value, "f")


def _timestamp(value: datetime) -> str:
    """A moment in UTC, whatever the session's zone; a time without a zone (timestamp_ntz) as it is."""
    return f'"{(value if value.tzinfo is None else value.astimezone(UTC)).isoformat()}"'


def _date(value: date) -> str:
    return f'"{value.isoformat()}"'
