"""Typed data without a bus: which type a handler asks for, how it is read and how it is sent."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import KW_ONLY, InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, List, Literal, NewType, Optional, Union  # noqa: UP035
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
from typing_extensions import TypeAliasType

from commandbus.exceptions import ConfigurationError, InvalidCommandError, InvalidDataError
from commandbus.messages import Command, NewCommand
from commandbus.typed import data_json, data_type, reader_of
from commandbus.worker.errors import invalid_data_info

if TYPE_CHECKING:
    from somewhere import OnlyForTypeCheckers  # type: ignore[import-not-found]


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


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (str, "x", "x"),
        (int, 3, 3),
        (int, 10**40, 10**40),
        (float, 1.5, 1.5),
        (float, 3, 3.0),
        (bool, True, True),
        (None, None, None),
        (Any, [1, {"a": None}], [1, {"a": None}]),
        (object, "x", "x"),
        (Decimal, "1.10", Decimal("1.10")),
        (Decimal, 3, Decimal(3)),
        (Decimal, 0.1, Decimal("0.1")),
        (UUID, AN_ID, UUID(AN_ID)),
        (AccountId, AN_ID, UUID(AN_ID)),
        (datetime, "2026-01-02T03:04:05", datetime(2026, 1, 2, 3, 4, 5)),  # noqa: DTZ001 - naive stays naive
        (datetime, "2026-01-02 03:04:05Z", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        (date, "2026-01-02", date(2026, 1, 2)),
        (time, "03:04", time(3, 4)),
        (timedelta, 90, timedelta(seconds=90)),
        (timedelta, 0.25, timedelta(milliseconds=250)),
        (Colour, "red", Colour.RED),
        (Level, 2, Level.HIGH),
        (Right, 3, Right.READ | Right.WRITE),
        (Literal["a", 1, None], "a", "a"),
        (Literal["a", 1, None], None, None),
        (Literal[Colour.RED], "red", Colour.RED),
        (Optional[int], None, None),  # noqa: UP045
        (int | None, 3, 3),
        (Union[int, str], "x", "x"),  # noqa: UP007
        (UUID | str, AN_ID, UUID(AN_ID)),
        (str | UUID, AN_ID, AN_ID),
        (date | datetime, "2026-01-02T03:04:05", datetime(2026, 1, 2, 3, 4, 5)),  # noqa: DTZ001
        (datetime | date, "2026-01-02", date(2026, 1, 2)),
        (list[int], [1, 2], [1, 2]),
        (List[int], [1, 2], [1, 2]),  # noqa: UP006
        (list, [1, "x"], [1, "x"]),
        (Sequence[int], [1], [1]),
        (Amounts, ["1"], [Decimal(1)]),
        (tuple[int, ...], [1, 2], (1, 2)),
        (tuple[int, str], [1, "x"], (1, "x")),
        (tuple, [1, "x"], (1, "x")),
        (set[int], [1, 2, 1], {1, 2}),
        (frozenset[int], [1], frozenset({1})),
        (Set[int], [1], frozenset({1})),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (Mapping[str, int], {"a": 1}, {"a": 1}),
        (dict, {"a": [1]}, {"a": [1]}),
        (Line, {"article": "x", "amount": "1"}, Line("x", Decimal(1))),
        (Line | Tree, {"name": "x"}, Tree("x")),
    ],
)
def test_json_becomes_what_the_field_says(kind: Any, value: Any, expected: Any) -> None:
    got = read(kind, value)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (str, 1, "must be a string, not an integer"),
        (str, None, "must be a string, not null"),
        (int, True, "must be an integer, not a boolean"),
        (int, 1.0, "must be an integer, not a decimal number"),
        (int, "1", "must be an integer, not a string"),
        (float, True, "must be a number, not a boolean"),
        (float, 10**400, "is too large"),
        (bool, 1, "must be true or false, not an integer"),
        (None, 0, "must be null, not an integer"),
        (Decimal, "x", "must be a decimal number"),
        (Decimal, "NaN", "must be a finite number"),
        (Decimal, True, "must be a decimal number, not a boolean"),
        (UUID, "x", "must be a UUID"),
        (UUID, 1, "must be a UUID, not an integer"),
        (datetime, "2026-01-02", "must be an ISO date and time"),
        (datetime, "yesterday at noon", "must be an ISO date and time"),
        (date, "2026-01-02T03:04:05", "must be an ISO date"),
        (time, "noon", "must be an ISO time"),
        (timedelta, "90", "must be a number, not a string"),
        (timedelta, 1e15, "is too large"),
        (Colour, "green", 'must be one of "red", "blue"'),
        (Level, True, "must be one of 1, 2"),
        (Level, [1], "must be one of 1, 2"),
        (Literal["a", 1], "b", 'must be one of "a", 1'),
        (Literal[1], True, "must be one of 1"),
        (Literal[1], [1], "must be one of 1"),
        (int | None, "x", "must be an integer, not a string"),
        (list[int], {"a": 1}, "must be an array, not an object"),
        (tuple[int, str], "x", "must be an array, not a string"),
        (tuple[int, str], [1], "must have 2 items, not 1"),
        (set[Any], [[1]], "holds what cannot be in a set"),
        (dict[str, int], [1], "must be an object, not an array"),
        (Line, "x", "must be an object, not a string"),
    ],
)
def test_json_of_another_kind_is_refused(kind: Any, value: Any, message: str) -> None:
    assert errors(holder(kind), {"value": value}) == [("value", message)]


def test_every_wrong_field_is_named_with_its_place() -> None:
    data = {
        "amount": "x",
        "lines": [{"article": 1, "amount": "1"}, {"article": "x", "amount": "?", "colour": "red"}, 7],
        "to": "somebody",
    }
    assert errors(Debit, data) == [
        ("amount", "must be an integer, not a string"),
        ("lines.0.article", "must be a string, not an integer"),
        ("lines.1.amount", "must be a decimal number"),
        ("lines.1.colour", "unknown"),
        ("lines.2", "must be an object, not an integer"),
        ("account", "missing"),
        ("to", "unknown"),
    ]


def test_the_errors_can_be_read_as_one_text() -> None:
    with pytest.raises(InvalidDataError, match=r"^amount: must be an integer, not null; account: missing$"):
        reader_of(Debit)({"amount": None})
    with pytest.raises(InvalidDataError, match=r"^must be an object, not an array$"):
        reader_of(Debit)([])


def test_the_values_of_an_object_and_of_a_row_are_named_with_their_place() -> None:
    assert errors(dict[str, tuple[int, str]], {"a": [1, 2], "b": ["x", "y"]}) == [
        ("a.1", "must be a string, not an integer"),
        ("b.0", "must be an integer, not a string"),
    ]


def test_of_several_types_the_errors_of_each_are_told() -> None:
    assert errors(holder(int | Line | None), {"value": {"article": "x"}}) == [
        ("value.int", "must be an integer, not an object"),
        ("value.Line.amount", "missing"),
    ]


def test_two_types_of_one_name_are_two() -> None:
    first, second = holder(int), holder(str)
    assert reader_of(first | second)({"value": "x"}) == second("x")


def test_defaults_stand_in_for_what_is_not_sent() -> None:
    assert reader_of(Debit)({"account": "DE-1", "amount": 3}) == Debit("DE-1", 3)


def test_a_class_may_hold_itself() -> None:
    data = {"name": "a", "children": [{"name": "b"}, {"name": "c", "children": [{"name": "d"}]}]}
    assert reader_of(Tree)(data) == Tree("a", [Tree("b"), Tree("c", [Tree("d")])])
    assert errors(Tree, {"name": "a", "children": [{"children": []}]}) == [("children.0.name", "missing")]


def test_data_that_is_nested_too_deeply_does_not_fit() -> None:
    data: dict[str, Any] = {"name": "x"}
    for _ in range(sys.getrecursionlimit()):
        data = {"name": "x", "children": [data]}
    assert errors(Tree, data) == [("", "is nested too deeply")]


def test_a_key_is_shown_in_part_if_it_is_long() -> None:
    [(where, _)] = errors(dict[str, int], {"k" * 100_000: "x"})
    assert where == "k" * 100


def test_long_errors_are_kept_as_far_as_there_is_room() -> None:
    info = invalid_data_info(InvalidDataError([("k" * 1000, "m" * 1000)] * 40))
    stored = json.loads(info.as_json())
    kept = stored["details"]["errors"]
    assert 10 < len(kept) < 40
    assert {(len(one["field"]), len(one["message"])) for one in kept} == {(300, 300)}
    assert stored["message"].endswith(f"; and {40 - len(kept)} more")


@dataclass
class Checked:
    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low < 0:
            raise ValueError
        if self.low > self.high:
            raise ValueError("low is above high")


def test_what_post_init_refuses_is_an_error_of_that_object() -> None:
    assert errors(Checked, {"low": 2, "high": 1}) == [("", "low is above high")]
    assert errors(Checked, {"low": -1, "high": 1}) == [("", "ValueError")]
    assert errors(holder(list[Checked]), {"value": [{"low": 2, "high": 1}]}) == [("value.0", "low is above high")]


def test_a_bug_in_post_init_is_not_the_fault_of_the_data() -> None:
    @dataclass
    class Buggy:
        def __post_init__(self) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        reader_of(Buggy)({})


@dataclass
class Computed:
    kinds: ClassVar[int] = 0
    width: int
    _: KW_ONLY
    height: int
    scale: InitVar[int] = 2
    area: int = field(init=False)

    def __post_init__(self, scale: int) -> None:
        self.area = self.width * self.height * scale


def test_what_the_class_computes_itself_is_neither_sent_nor_read() -> None:
    sent = json.loads(data_json(NewCommand("X", uuid4(), Computed(2, height=3))))
    assert sent == {"width": 2, "height": 3}
    assert reader_of(Computed)(sent).area == 12
    assert errors(Computed, {**sent, "area": 12, "scale": 1}) == [("area", "unknown"), ("scale", "unknown")]


@dataclass
class NeedsMore:
    name: str
    suffix: InitVar[str]


class Ordinary:
    pass


@dataclass
class Unresolvable:
    other: OnlyForTypeCheckers


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (holder(bytes), "Holder.value has the type bytes, which cannot be read from JSON"),
        (holder(list[Ordinary]), "Holder.value has the type Ordinary"),
        (holder(dict[int, str]), "Holder.value has the type dict[int, str]"),
        (holder(Odd), "Holder.value has the type Odd"),
        (holder(Literal[b"x"]), "Holder.value has the type typing.Literal[b'x']"),
        (holder(Annotated[int, "more than 0"]), "Holder.value has the type typing.Annotated[int, 'more than 0']"),
        (holder([int]), "Holder.value has the type [<class 'int'>]"),
        (holder(Callable[..., Any]), "Holder.value has the type collections.abc.Callable[..., typing.Any]"),
        (NeedsMore, "NeedsMore cannot be made without suffix"),
        (Unresolvable, "the annotations of Unresolvable cannot be resolved: name 'OnlyForTypeCheckers' is not defined"),
        (int, "the data of a command cannot be int"),
        (list[Line], "the data of a command cannot be list[tests.test_typed.Line]"),
        (Line | None, "the data of a command cannot be"),
    ],
)
def test_a_type_that_cannot_be_read_is_named(kind: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        reader_of(kind)
    assert words in str(caught.value)


# Which type a handler asks for


def plain(command: Command, context: Any) -> None: ...
def bare(command, context): ...  # type: ignore[no-untyped-def]
def whatever(*arguments: Any) -> None: ...
def a_dict(command: Command[dict[str, Any]], context: Any) -> None: ...
def anything(command: Command[Any], context: Any) -> None: ...
def unknown(command: OnlyForTypeCheckers, context: Any) -> None: ...
def typed(command: Command[Debit], context: OnlyForTypeCheckers) -> None: ...
def early(command: Command["Debit"], context: Any) -> None: ...  # noqa: UP037
def late(service: str, command: Command[Debit], context: Any) -> None: ...
async def later(command: Command[Debit], context: Any) -> None: ...


def in_bulk(commands: list[Command[Debit]], context: Any) -> None: ...
def in_sequence(commands: Sequence[Command[Debit]], context: Any) -> None: ...
def plainly_in_bulk(commands: list[Command], context: Any) -> None: ...


DebitCommand = Command[Debit]


def by_alias(command: DebitCommand, context: Any) -> None: ...


class Service:
    def method(self, command: Command[Debit], context: Any) -> None: ...

    @classmethod
    def of_class(cls, command: Command[Debit], context: Any) -> None: ...

    @staticmethod
    def static(command: Command[Debit], context: Any) -> None: ...

    def __call__(self, command: Command[Debit], context: Any) -> None: ...


def noisy(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*arguments: Any) -> Any:
        return function(*arguments)

    return wrapper


@pytest.mark.parametrize("function", [plain, bare, whatever, a_dict, anything, unknown, dict.get])
def test_a_handler_that_says_nothing_of_its_data_gets_a_dict(function: Any) -> None:
    assert data_type(function, bulk=False) is None


def test_a_bulk_handler_that_says_nothing_of_its_data_gets_dicts() -> None:
    assert data_type(plainly_in_bulk, bulk=True) is None
    assert data_type(bare, bulk=True) is None


@pytest.mark.parametrize(
    "function",
    [
        typed,
        early,
        later,
        by_alias,
        functools.partial(late, "service"),
        functools.partial(typed),
        Service().method,
        Service.of_class,
        Service.static,
        Service(),
        noisy(typed),
        noisy(noisy(Service().method)),
        functools.partial(noisy(late), "service"),
    ],
)
def test_the_annotation_is_found_however_the_handler_is_wrapped(function: Any) -> None:
    assert data_type(function, bulk=False) is Debit


@pytest.mark.parametrize("function", [in_bulk, in_sequence])
def test_a_bulk_handler_asks_for_lists_of_commands(function: Any) -> None:
    assert data_type(function, bulk=True) is Debit


@pytest.mark.parametrize(("function", "bulk"), [(in_bulk, False), (typed, True)])
def test_a_batch_size_and_the_annotation_must_agree(function: Any, bulk: bool) -> None:
    with pytest.raises(ConfigurationError, match=r"annotated .*Command\[.*Debit\].*; it must be .*batch_size"):
        data_type(function, bulk=bulk)


def hidden(command: Command[OnlyForTypeCheckers], context: Any) -> None: ...


def inner_class() -> Any:
    @dataclass
    class Local:
        x: int

    def handler(command: Command[Local], context: Any) -> None: ...

    return handler


@pytest.mark.parametrize(("function", "name"), [(hidden, "OnlyForTypeCheckers"), (inner_class(), "Local")])
def test_an_annotation_that_cannot_be_resolved_is_an_error_with_the_remedy(function: Any, name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        data_type(function, bulk=False)
    assert f"Command[{name}] cannot be resolved: name '{name}' is not defined" in str(caught.value)
    assert "at the top level of a module and import them at run time" in str(caught.value)


def test_a_typed_command_can_be_made() -> None:
    made = Command[Debit](uuid4(), "X", "d", uuid4(), "r", datetime.now(UTC), Debit("DE-1", 1))
    assert made.data.account == "DE-1"


# Sending


def sent(value: Any) -> Any:
    """What comes out of the queue."""
    return json.loads(data_json(NewCommand("X", uuid4(), value)))


@dataclass(frozen=True)
class Inner:
    number: int
    colour: Colour


@dataclass(frozen=True)
class Everything:
    text: str
    number: int
    fraction: float
    flag: bool
    nothing: None
    amount: Decimal
    key: UUID
    moment: datetime
    day: date
    clock: time
    duration: timedelta
    colour: Colour
    level: Level
    right: Right
    word: Literal["a", "b", 1, True]
    maybe: date | None
    either: int | Decimal | Inner
    numbers: list[float]
    row: tuple[int, UUID]
    rows: tuple[tuple[str, ...], ...]
    some: set[UUID]
    inners: frozenset[Inner]
    names: dict[str, timedelta]
    inner: Inner


texts = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]))
floats = st.floats(allow_nan=False, allow_infinity=False)
decimals = st.decimals(allow_nan=False, allow_infinity=False)
zones = st.none() | st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
durations = st.timedeltas(timedelta(days=-90_000), timedelta(days=90_000))  # beyond, a float has no microseconds
inners = st.builds(Inner)


@given(
    st.builds(
        Everything,
        text=texts,
        fraction=floats,
        amount=decimals,
        moment=st.datetimes(timezones=zones),
        clock=st.times(timezones=zones),
        duration=durations,
        either=st.integers() | decimals | inners,
        numbers=st.lists(floats),
        rows=st.lists(st.lists(texts).map(tuple)).map(tuple),
        inners=st.frozensets(inners, max_size=3),
        names=st.dictionaries(texts, durations),
        inner=inners,
    )
)
def test_a_dataclass_comes_back_equal(value: Everything) -> None:
    assert reader_of(Everything)(sent(value)) == value


def test_the_same_set_is_sent_the_same_way_by_every_process() -> None:
    """Otherwise sending it again would be another content under the same id."""
    program = (
        "from dataclasses import dataclass; from commandbus.messages import NewCommand; from uuid import UUID\n"
        "from commandbus.typed import data_json\n"
        "@dataclass\n"
        "class D:\n    tags: set[str]\n"
        "print(data_json(NewCommand('X', UUID(int=1), D({'a', 'b', 'c', 'd', 'e', 'f'}))))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in "123"
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"x", "value is a bytes"),
        (math.nan, "value is nan"),
        (Decimal("Infinity"), "value is a Decimal"),
        ("a\x00b", "value holds the character \\u0000"),
        ({1: 2}, "value has the key 1"),
        ({"a": [Ordinary()]}, "value.a[0] is a Ordinary"),
        ({b"x"}, "value[0] is a bytes"),
    ],
)
def test_a_dataclass_with_what_json_cannot_hold_is_refused_with_the_place(value: Any, words: str) -> None:
    with pytest.raises(InvalidCommandError) as caught:
        sent(holder(Any)(value))
    assert words in str(caught.value)
    assert "data of command" in str(caught.value)


def test_a_dataclass_that_contains_itself_is_refused() -> None:
    tree = Tree("a")
    tree.children.append(tree)
    with pytest.raises(InvalidCommandError, match="nested too deeply, or contains itself"):
        sent(tree)


@pytest.mark.parametrize("value", [Debit, [Debit("DE-1", 1)], Ordinary(), None, {"debit": Debit("DE-1", 1)}])
def test_only_the_data_itself_may_be_a_dataclass(value: Any) -> None:
    with pytest.raises(InvalidCommandError):
        sent(value)


# Pydantic


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
