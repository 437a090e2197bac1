"""Types, and what the tests do with them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from typing import Any, NewType
from uuid import UUID, uuid4

import pytest
from typing_extensions import TypeAliasType

from commandbus.exceptions import InvalidDataError
from commandbus.messages import NewCommand
from commandbus.typed import data_json, reader_of


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Right(Flag):
    READ = 1
    WRITE = 2


class Odd(Enum):
    PAIR = (1, 2)


@dataclass(frozen=True)
class Line:
    article: str
    amount: Decimal


@dataclass(frozen=True)
class Debit:
    account: str
    amount: int
    lines: list[Line] = field(default_factory=list)
    note: str | None = None


@dataclass
class Tree:
    name: str
    children: list[Tree] = field(default_factory=list)


def holder(kind: Any) -> Any:
    """A dataclass with one field `value` of that type."""
    return dataclass(type("Holder", (), {"__annotations__": {"value": kind}}))


def read(kind: Any, value: Any) -> Any:
    return reader_of(holder(kind))({"value": value}).value


def errors(kind: Any, data: Any) -> list[tuple[str, str]]:
    with pytest.raises(InvalidDataError) as caught:
        reader_of(kind)(data)
    return list(caught.value.errors)


AccountId = NewType("AccountId", UUID)
Amounts = TypeAliasType("Amounts", list[Decimal])
AN_ID = "12345678-1234-5678-1234-567812345678"


def sent(value: Any) -> Any:
    """What comes out of the queue."""
    return json.loads(data_json(NewCommand("X", uuid4(), value)))


class Ordinary:
    pass
