"""What a dry run has met so far: it must find the same id with other content, and the database forgets each chunk."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable

from commandbus.messages import NewCommand


class Seen:
    """On disk, in a file that SQLite removes: a file of commands may be longer than memory."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("")
        self._database.execute("CREATE TABLE seen (command_id BLOB PRIMARY KEY, digest BLOB) WITHOUT ROWID")

    def add(self, commands: Iterable[NewCommand]) -> None:
        rows = [(command.command_id.bytes, _digest(command)) for command in commands]
        self._database.executemany("INSERT OR IGNORE INTO seen VALUES (?, ?)", rows)

    def compare(self, command: NewCommand) -> bool | None:
        """Whether the command that came before under this id is the same. None if there was none."""
        query = "SELECT digest FROM seen WHERE command_id = ?"
        row = self._database.execute(query, [command.command_id.bytes]).fetchone()
        return None if row is None else row[0] == _digest(command)

    def close(self) -> None:
        self._database.close()


def _digest(command: NewCommand) -> bytes:
    text = json.dumps(command.data, sort_keys=True)
    return hashlib.sha256(f"{command.command_type}\n{text}".encode()).digest()
