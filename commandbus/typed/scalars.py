"""How single values are read from JSON. Strictly: JSON has types of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal, DecimalException
from types import NoneType
from typing import Any
from uuid import UUID

from commandbus.exceptions import InvalidDataError

Reader = Callable[[Any], Any]
"""Makes a value of JSON as Python has parsed it, or raises InvalidDataError."""


def json_kind(value: object) -> str:
    """What a value is called in JSON."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a decimal number"
        case str():
            return "a string"
        case Mapping():
            return "an object"
        case _:
            return "an array"


def wrong(message: str) -> InvalidDataError:
    return InvalidDataError([("", message)])


def expected(what: str, value: object) -> InvalidDataError:
    return wrong(f"must be {what}, not {json_kind(value)}")


def anything(value: Any) -> Any:
    return value


def _exactly(kind: type, what: str) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not kind:  # a bool is no int
            raise expected(what, value)
        return value

    return read


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise expected("a number", value)
    try:
        return float(value)
    except OverflowError:
        raise wrong("is too large") from None


def _decimal(value: Any) -> Decimal:
    if type(value) not in (str, int, float):
        raise expected("a decimal number", value)
    try:
        number = Decimal(str(value) if isinstance(value, float) else value)
    except DecimalException:
        raise wrong("must be a decimal number") from None
    if not number.is_finite():
        raise wrong("must be a finite number")
    return number


def _duration(value: Any) -> timedelta:
    try:
        return timedelta(seconds=_number(value))
    except OverflowError:
        raise wrong("is too large") from None


def _text(make: Callable[[str], Any], what: str) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, str):
            raise expected(what, value)
        try:
            return make(value)
        except ValueError:
            raise wrong(f"must be {what}") from None

    return read


def _moment(text: str) -> datetime:
    if len(text) <= len("2026-01-01"):  # Python would take a date for its midnight
        raise ValueError("no time")
    return datetime.fromisoformat(text)


SCALARS: dict[Any, Reader] = {
    Any: anything,
    object: anything,
    None: _exactly(NoneType, "null"),
    NoneType: _exactly(NoneType, "null"),
    bool: _exactly(bool, "true or false"),
    int: _exactly(int, "an integer"),
    float: _number,
    str: _exactly(str, "a string"),
    Decimal: _decimal,
    UUID: _text(UUID, "a UUID"),
    datetime: _text(_moment, "an ISO date and time"),
    date: _text(date.fromisoformat, "an ISO date"),
    time: _text(time.fromisoformat, "an ISO time"),
    timedelta: _duration,
}
