"""Values that nobody shall see: those of the keys in COMMANDBUS["MASK"], at any depth, also in JSON within a text."""

from __future__ import annotations

import json
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
    if text[:1] not in ("{", "["):
        return text
    try:
        inner = json.loads(text)
    except ValueError:
        return text
    without = _masked(inner, keys)
    return text if without == inner else json.dumps(without, ensure_ascii=False)


def _unmasked(value: Any, before: Any, keys: set[str], path: str) -> Any:
    if value == _masked(before, keys):
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
            items = [item if inner == _masked(item, keys) else None for inner, item in zip(value, items, strict=True)]
        return [
            _unmasked(inner, item, keys, f"{path}[{n}]")
            for n, (inner, item) in enumerate(zip(value, items, strict=True))
        ]
    if isinstance(value, str) and MASK in value and isinstance(before, str) and MASK in _masked_text(before, keys):
        raise _unsure(path)
    return value


def _one(name: str, value: Any, before: dict[str, Any], keys: set[str], path: str) -> Any:
    if value != MASK or name.lower() not in keys:
        return _unmasked(value, before.get(name), keys, path)
    if name not in before:
        raise _unsure(path)
    return before[name]


def _unsure(path: str) -> InvalidCommandError:
    return InvalidCommandError(f"it is not sure which value {MASK} stands for at {path}; write the value itself")
