"""Pydantic's models. It is imported only when there is one."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

from commandbus.exceptions import ConfigurationError, InvalidDataError
from commandbus.typed.scalars import Reader

if TYPE_CHECKING:
    from pydantic import TypeAdapter

QUOTING = {
    "bytes_invalid_encoding": "Data should be validly encoded",
    "timezone_offset": "Timezone offset should be the required one",
    "union_tag_invalid": "Input tag should be one of the expected tags",
    "uuid_parsing": "Input should be a valid UUID",
}
"""The errors whose messages repeat a part of the data, and what is said instead."""


def is_pydantic(kind: Any) -> bool:
    """A model, or one of pydantic's own dataclasses."""
    return isinstance(kind, type) and hasattr(kind, "__pydantic_validator__")


def reader(kind: Any) -> Reader:
    from pydantic import ValidationError
    from pydantic.dataclasses import rebuild_dataclass

    try:
        if hasattr(kind, "model_rebuild"):
            kind.model_rebuild()
        else:
            rebuild_dataclass(kind)
        adapter = _adapter(kind)
    except Exception as error:
        raise ConfigurationError(f"the pydantic model {kind.__name__} is not complete: {error}") from error

    def read(value: Any) -> Any:
        try:
            return adapter.validate_json(json.dumps(value))  # as JSON, where a strict model takes a string for a UUID
        except ValidationError as error:
            found = error.errors(include_input=False, include_url=False, include_context=False)
        raise InvalidDataError([(_path(one["loc"]), QUOTING.get(one["type"], one["msg"])) for one in found])

    return read


def dump(value: Any) -> Any:
    """As JSON that the same model reads: by the aliases that it has, and without what it computes."""
    kind: Any = type(value)
    return _adapter(kind).dump_python(value, mode="json", by_alias=True, round_trip=True)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _path(location: tuple[str | int, ...]) -> str:
    return ".".join(str(part)[:100] for part in location)
