"""How a line of a file becomes a command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from commandbus import api
from commandbus.exceptions import InvalidCommandError
from commandbus.ids import derived_id
from commandbus.messages import NewCommand
from commandbus.transitions import bodies_of


@dataclass(frozen=True, kw_only=True)
class Recipe:
    domain: str
    command_type: str | None = None
    """Of lines that name none."""
    type_from: str = "after the domain"
    """Where such a type is written, for the error of a line that has none."""
    id_from: tuple[str, ...] = ()
    """The fields of the data that make the id of a line that has none."""

    def command(self, fields: Mapping[str, Any]) -> NewCommand:
        """Raises a CommandBusError that names what is wrong with the line. Checks all that needs no other line."""
        command_type = fields.get("type") if fields.get("type") is not None else self.command_type
        if command_type is None:
            raise InvalidCommandError(f"there is no type: write it into the line, or name it {self.type_from}")
        command = NewCommand(
            command_type,
            self._id(command_type, fields),
            fields["data"],
            fields.get("reply_to"),
            fields.get("correlation_id"),
            fields.get("delay"),
        )
        checked = api.checked(command, api.database_of(self.domain))
        bodies_of([checked])
        return checked

    def _id(self, command_type: str, fields: Mapping[str, Any]) -> UUID:
        if fields.get("command_id") is not None:
            return api.uuid_of(fields["command_id"], "command_id")
        if not self.id_from:
            raise InvalidCommandError(
                "there is no command_id, and without one a second run would send the command twice; add it, or name "
                "the fields of the data that identify a command: --id-from FIELD,FIELD"
            )
        data = fields["data"]
        if not isinstance(data, Mapping):
            raise InvalidCommandError(f"data must be a JSON object, not {type(data).__name__}: {data!r:.100}")
        if missing := [name for name in self.id_from if name not in data]:
            raise InvalidCommandError(f"the data have no field {missing[0]!r}, which --id-from names")
        try:
            return derived_id(self.domain, command_type, [data[name] for name in self.id_from])
        except (ValueError, RecursionError) as error:
            raise InvalidCommandError(f"no id can be made from {', '.join(self.id_from)}: {error}") from None
