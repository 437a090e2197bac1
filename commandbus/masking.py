"""Values that nobody shall see: those of the keys in COMMANDBUS["MASK"], at any depth, also in JSON within a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from commandbus.exceptions import InvalidCommandError

MASK = "••••••"
TOO_DEEP = "nested too deeply to be shown"


def masked(value: Any, keys: Iterable[str]) -> Any:
    """A copy without the values of these keys. Upper and lower case are the same."""
    try:
        return _masked(value, {key.lower() for key in keys})
    except RecursionError:
        return TOO_DEEP


def unmasked(value: Any, before: Any, keys: Iterable[str]) -> Any:
    """What somebody has made of a masked copy of `before`, with the values that were masked at their places again.

    Raises InvalidCommandError for a mask of which it is not sure what it stands for.
    """
    try:
        return _unmasked(value, before, {key.lower() for key in keys}, "")
    except RecursionError:
        raise InvalidCommandError("it is nested too deeply to be edited here") from None


def _masked(value: Any, keys: set[str]) -> Any:
    if isinstance(value, dict):
        return {name: MASK if name.lower() in keys else _masked(inner, keys) for name, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner, keys) for inner in value]
    return _masked_text(value, keys) if isinstance(value, str) else value


def _masked_text(text: str, keys: set[str]) -> str:
    if text.lstrip()[:1] not in ("{", "[", '"'):
        return text
    try:
        inner = json.loads(text)
        without = _masked(inner, keys)
    except ValueError:
        inner = without = None
    if without != inner:
        return json.dumps(without, ensure_ascii=False)
    # It may be JSON all the same, in other people's eyes: with a key that comes twice, or cut off in the middle.
    names = "|".join(map(re.escape, keys))
    return MASK if keys and re.search(rf"""["'](?:{names})\\*["']\s*:""", text, re.IGNORECASE) else text


def _unmasked(value: Any, before: Any, keys: set[str], path: str) -> Any:
    if _is_same(value, _masked(before, keys)):
        return before  # untouched
    if isinstance(value, dict):
        known = before if isinstance(before, dict) else {}
        return {
            name: _one(name, inner, known, keys, f"{path}.{name}" if path else name) for name, inner in value.items()
        }
    if isinstance(value, list):
        # Items may have been moved, so what an item stands for is known only of one that is alone.
        items = before if isinstance(before, list) and len(before) == len(value) else [None] * len(value)
        if len(value) > 1:
            pairs = zip(value, items, strict=True)
            items = [item if _is_same(inner, _masked(item, keys)) else None for inner, item in pairs]
        return [
            _unmasked(inner, item, keys, f"{path}[{n}]")
            for n, (inner, item) in enumerate(zip(value, items, strict=True))
        ]
    if isinstance(value, str) and MASK in value:
        raise _unsure(path)
    return value


def _is_same(one: Any, other: Any) -> bool:
    """As JSON: there, 1, 1.0 and true are three values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def _one(name: str, value: Any, before: dict[str, Any], keys: set[str], path: str) -> Any:
    if value != MASK or name.lower() not in keys:
        return _unmasked(value, before.get(name), keys, path)
    if name not in before:
        raise _unsure(path)
    return before[name]


def _unsure(path: str) -> InvalidCommandError:
    return InvalidCommandError(f"it is not sure which value {MASK} stands for at {path}; write the value itself")
