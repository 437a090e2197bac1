"""How JSON becomes what a field says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import KW_ONLY, InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, List, Literal, Optional, Union  # noqa: UP035
from uuid import UUID, uuid4

import pytest

from commandbus.exceptions import ConfigurationError, InvalidDataError
from commandbus.messages import NewCommand
from commandbus.typed import data_json, reader_of
from commandbus.worker.errors import invalid_data_info
from tests.typed.samples import (
    AN_ID,
    AccountId,
    Amounts,
    Colour,
    Debit,
    Level,
    Line,
    Odd,
    Ordinary,
    Right,
    Tree,
    errors,
    holder,
    read,
)

if TYPE_CHECKING:
    from somewhere import OnlyForTypeCheckers  # type: ignore[import-not-found]


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
        (list[Line], "the data of a command cannot be list[tests.typed.samples.Line]"),
        (Line | None, "the data of a command cannot be"),
    ],
)
def test_a_type_that_cannot_be_read_is_named(kind: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        reader_of(kind)
    assert words in str(caught.value)
