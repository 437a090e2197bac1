"""JSON as PostgreSQL can hold it. What it cannot hold is refused with its place, before it is sent."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import orjson

from commandbus.exceptions import InvalidCommandError

_LONG_NUMBER = re.compile(r"[0-9]{16}")


def json_object(value: object, what: str) -> str:
    """The JSON text of a mapping, or an InvalidCommandError that names the place and the remedy."""
    if not isinstance(value, Mapping):
        raise InvalidCommandError(f"{what} must be a JSON object (a dict), not {type(value).__name__}: {value!r:.100}")
    return json_text(value, what)


def json_text(value: object, what: str = "data") -> str:
    try:
        if (usual := usual_json(value)) is not None:
            return usual
        _check(value, what)
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, default=_plain)
        text.encode()
    except RecursionError:
        raise InvalidCommandError(f"{what} is nested too deeply, or contains itself") from None
    except UnicodeEncodeError:
        raise InvalidCommandError(f"{what} holds half a surrogate pair, which is not a character") from None
    except ValueError as error:
        if isinstance(error, InvalidCommandError):
            raise
        raise InvalidCommandError(f"{what} cannot be written as JSON: {error}") from None
    return text


def usual_json(value: object) -> str | None:
    """The JSON text of what most data is. None if there is more to say about it."""
    try:
        return orjson.dumps(value).decode() if _is_usual(value) else None
    except (TypeError, RecursionError):  # of integers of more than 64 bits, for example
        return None


def parse_json(text: str) -> Any:
    """Raises ValueError or RecursionError for what Python cannot hold."""
    if _LONG_NUMBER.search(text):
        return json.loads(text)  # orjson makes floats of integers of more than 64 bits
    return orjson.loads(text)


def parse_exactly(text: str) -> Any:
    """For what is written back. Raises InvalidCommandError, also for a number that would lose digits on the way."""
    try:
        return json.loads(text, parse_float=_exact)
    except InvalidCommandError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidCommandError(f"This is not JSON: {error}") from None


def _exact(number: str) -> float:
    value = float(number)
    if not math.isfinite(value) or Decimal(repr(value)) != Decimal(number):
        raise InvalidCommandError(f"The number {number:.100} has more digits than are kept here; make a string of it")
    return value


def _is_usual(value: object) -> bool:
    """Whether it is what most data is: plain values in plain containers, that JSON and PostgreSQL can hold."""
    kind = type(value)
    if kind is str:
        return "\x00" not in value  # type: ignore[operator]
    if kind is int or kind is bool or value is None:
        return True
    if kind is dict:
        return all(
            type(key) is str and "\x00" not in key and _is_usual(item)
            for key, item in value.items()  # type: ignore[attr-defined]
        )
    if kind is list:
        return all(map(_is_usual, value))  # type: ignore[call-overload]
    return kind is float and math.isfinite(value)  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value)


def _check(value: object, path: str) -> None:
    if value is None or isinstance(value, bool | int):
        return
    if isinstance(value, str):
        if "\x00" in value:
            raise InvalidCommandError(f"{path} holds the character \\u0000, which PostgreSQL cannot store; remove it")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidCommandError(f"{path} is {value}, which JSON cannot hold; use a number, null or a string")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidCommandError(f"{path} has the key {key!r}; JSON keys are strings, use {str(key)!r}")
            if "\x00" in key:
                raise InvalidCommandError(f"{path} has the key {key!r} with \\u0000, which PostgreSQL cannot store")
            _check(item, f"{path}.{key}")
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        for number, item in enumerate(value):
            _check(item, f"{path}[{number}]")
    else:
        raise InvalidCommandError(
            f"{path} is a {type(value).__name__}, which JSON cannot hold; convert it first, for example with str()"
        )
