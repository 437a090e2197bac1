"""From what is sent to JSON that a typed handler reads as an equal value."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Set
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from commandbus.encoding import json_object, usual_json
from commandbus.exceptions import InvalidCommandError
from commandbus.messages import NewCommand
from commandbus.typed.pydantic_models import dump, is_pydantic
from commandbus.typed.readers import is_dataclass


def data_json(command: NewCommand) -> str:
    """The JSON text of a command's data, or an InvalidCommandError."""
    data: Any = command.data
    if type(data) is dict and (text := usual_json(data)) is not None:
        return text
    what = f"data of command {command.command_id}"
    if not isinstance(data, Mapping) and (is_dataclass(type(data)) or is_pydantic(type(data))):
        try:
            data = _plain(data)
        except RecursionError:
            raise InvalidCommandError(f"{what} is nested too deeply, or contains itself") from None
        except ValueError as error:  # pydantic's
            raise InvalidCommandError(f"{what} cannot be written as JSON: {error}") from None
    return json_object(data, what)


def _plain(value: Any) -> Any:
    """As JSON, if there is a reader for it. The rest stays as it is, to be refused with its place."""
    match value:
        case Enum():
            return _plain(value.value)
        case None | str() | int() | float():
            return value
        case UUID():
            return str(value)
        case Decimal() if value.is_finite():
            return str(value)
        case date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds() if value.microseconds else value // timedelta(seconds=1)
        case Mapping():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case Set():
            # In the same order in every process: the same content sent again must have the same hash.
            return sorted(map(_plain, value), key=lambda item: json.dumps(item, sort_keys=True, default=repr))
        case _ if is_pydantic(type(value)):
            return dump(value)
        case _ if is_dataclass(type(value)):
            return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        case _:
            return value
