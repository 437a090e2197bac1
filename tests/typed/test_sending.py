"""How typed data is sent."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandbus.exceptions import InvalidCommandError
from commandbus.typed import reader_of
from tests.typed.samples import (
    Colour,
    Debit,
    Level,
    Ordinary,
    Right,
    Tree,
    holder,
    sent,
)


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
