"""Pydantic's models."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import UUID, uuid4

import pytest
from pydantic import (
    UUID4,
    AwareDatetime,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    RootModel,
    computed_field,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass

from commandbus.exceptions import ConfigurationError, InvalidCommandError
from commandbus.typed import reader_of
from tests.typed.samples import (
    AN_ID,
    Colour,
    Line,
    errors,
    sent,
)

if TYPE_CHECKING:
    from somewhere import OnlyForTypeCheckers  # type: ignore[import-not-found]


class Card(BaseModel):
    kind: Literal["card"]
    number: str


class Transfer(BaseModel):
    kind: Literal["transfer"]
    iban: str


class Payment(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    id: UUID
    when: datetime
    amount: Decimal = Field(gt=0)
    way: Annotated[Card | Transfer, Discriminator("kind")]
    lines: list[Line] = []
    note: str = Field("", alias="theNote")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def day(self) -> date:
        return self.when.date()


def payment(**changes: Any) -> dict[str, Any]:
    right = {"id": AN_ID, "when": "2026-01-02T03:04:05", "amount": "1.10", "way": {"kind": "card", "number": "1"}}
    return {**right, **changes}


def test_a_pydantic_model_is_read_as_json_even_if_it_is_strict() -> None:
    got = reader_of(Payment)(payment(lines=[{"article": "x", "amount": "2"}], theNote="hello"))
    assert isinstance(got, Payment)
    assert (got.id, got.amount, got.note) == (UUID(AN_ID), Decimal("1.10"), "hello")
    assert got.lines == [Line("x", Decimal(2))]


def test_a_pydantic_model_comes_back_equal() -> None:
    value = Payment(
        id=uuid4(),
        when=datetime.now(UTC),
        amount=Decimal("1.10"),
        way=Card(kind="card", number="1"),
        lines=[Line("x", Decimal(2))],
        theNote="hello",
    )
    assert reader_of(Payment)(sent(value)) == value


def test_every_wrong_field_of_a_pydantic_model_is_named() -> None:
    data = payment(amount=-1, lines=[{"article": "x"}, {"article": 1, "amount": 1}], colour="red")
    del data["when"]
    assert errors(Payment, data) == [
        ("when", "Field required"),
        ("amount", "Input should be greater than 0"),
        ("lines.0.amount", "Field required"),
        ("lines.1.article", "Input should be a valid string"),
        ("colour", "Extra inputs are not permitted"),
    ]


class Secretive(BaseModel):
    key: UUID
    version: UUID4
    number: int
    fraction: float
    amount: Decimal
    flag: bool
    moment: datetime
    aware: AwareDatetime
    day: date
    clock: time
    duration: timedelta
    raw: Base64Bytes
    colour: Colour
    word: Literal["a"]
    way: Annotated[Card | Transfer, Discriminator("kind")]
    either: int | date | Line
    several: list[int]
    some: set[int]
    names: dict[str, int]
    pattern: str = Field(pattern="^[a-z]+$")
    short: str = Field(max_length=2)


def test_an_error_of_a_pydantic_model_does_not_repeat_the_value() -> None:
    secret = "§SECRET§"
    data: dict[str, Any] = dict.fromkeys(Secretive.model_fields, secret)
    data |= {"way": {"kind": secret}, "several": [secret], "names": {"a": secret}}
    found = errors(Secretive, data)
    assert {where.split(".")[0] for where, _ in found} == set(Secretive.model_fields)
    assert not [message for _, message in found if "§" in message or str("§".encode()[0]) in message]


class Model(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def is_even(cls, number: int) -> int:
        if number == 13:
            raise ZeroDivisionError
        if number % 2:
            raise ValueError("must be even")
        return number

    @model_validator(mode="after")
    def is_small(self) -> Model:
        if self.number > 100:
            raise ValueError("all of it is too much")
        return self


def test_what_a_validator_refuses_is_an_error_of_its_field_or_of_the_whole() -> None:
    assert errors(Model, {"number": 1}) == [("number", "Value error, must be even")]
    assert errors(Model, {"number": 102}) == [("", "Value error, all of it is too much")]


def test_a_bug_in_a_validator_is_not_the_fault_of_the_data() -> None:
    with pytest.raises(ZeroDivisionError):
        reader_of(Model)({"number": 13})


@pydantic_dataclass
class Point:
    x: int
    y: int = 0


@dataclass
class Mixed:
    model: Model
    points: list[Point]


def test_dataclasses_may_hold_what_is_pydantics_and_it_comes_back_equal() -> None:
    value = Mixed(Model(number=2), [Point(1, 2)])
    assert sent(value) == {"model": {"number": 2}, "points": [{"x": 1, "y": 2}]}
    assert reader_of(Mixed)(sent(value)) == value
    assert errors(Mixed, {"model": {"number": "x"}, "points": [{"y": "z"}]}) == [
        ("model.number", "Input should be a valid integer, unable to parse string as an integer"),
        ("points.0.x", "Field required"),
        ("points.0.y", "Input should be a valid integer, unable to parse string as an integer"),
    ]


def test_a_dataclass_of_pydantics_own_is_left_to_pydantic() -> None:
    assert reader_of(Point)(sent(Point(1))) == Point(1)
    assert reader_of(Point)({"x": "1"}) == Point(1)


class Unfinished(BaseModel):
    other: OnlyForTypeCheckers


def test_a_model_that_is_not_complete_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"the pydantic model Unfinished is not complete: name 'OnlyFor"):
        reader_of(Unfinished)


@pytest.mark.parametrize("value", [object(), b"\xff"])
def test_a_model_with_what_json_cannot_hold_is_refused(value: Any) -> None:
    class Loose(BaseModel):
        value: Any

    with pytest.raises(InvalidCommandError, match=r"data of command .* cannot be written as JSON"):
        sent(Loose(value=value))


def test_a_model_that_is_no_object_is_refused() -> None:
    with pytest.raises(InvalidCommandError, match="must be a JSON object"):
        sent(RootModel[list[int]]([1]))


def test_pydantic_is_not_imported_for_dataclasses() -> None:
    program = (
        "import sys; sys.modules['pydantic'] = sys.modules['typing_extensions'] = None\n"  # importing them fails
        "from dataclasses import dataclass; from uuid import uuid4\n"
        "from commandbus import NewCommand\n"
        "from commandbus.typed import data_json, reader_of\n"
        "import json\n"
        "@dataclass\n"
        "class D:\n    n: int\n"
        "print(reader_of(D)(json.loads(data_json(NewCommand('X', uuid4(), D(7))))).n)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "7\n"
