from __future__ import annotations

import doctest
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid5

import pytest

from commandbus import ids
from commandbus.ids import derived_id, uuid7


def test_new_ids_are_of_version_7_and_in_the_order_of_their_making() -> None:
    made = [uuid7() for _ in range(10_000)]
    assert made == sorted(made)
    assert {(one.version, one.variant) for one in made} == {(7, "specified in RFC 4122")}
    assert abs(made[0].int >> 80) - time.time() * 1000 < 10_000


def test_threads_never_make_the_same_id() -> None:
    with ThreadPoolExecutor(4) as threads:
        many: list[list[UUID]] = list(threads.map(lambda _: [uuid7() for _ in range(5_000)], range(4)))
    assert len({one for made in many for one in made}) == 20_000


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (["DE-1", 7], '["DE-1",7]'),
        (["7"], '["7"]'),
        ([7.5, True, None], "[7.5,true,null]"),
        (["Zoë\n"], '["Zoë\\n"]'),
        ([{"b": 1, "a": [2]}], '[{"a":[2],"b":1}]'),
    ],
)
def test_an_id_is_uuid5_of_the_key_as_a_json_array(key: list[Any], text: str) -> None:
    space = uuid5(NAMESPACE_URL, "commandbus:payments/DebitAccount")
    assert derived_id("payments", "DebitAccount", key) == uuid5(space, text)


def test_domain_type_and_order_count() -> None:
    made = [
        derived_id("payments", "Debit", ["a", "b"]),
        derived_id("payments", "Debit", ["b", "a"]),
        derived_id("payments", "Credit", ["a", "b"]),
        derived_id("reports", "Debit", ["a", "b"]),
    ]
    assert len(set(made)) == 4


@pytest.mark.parametrize("value", [float("nan"), "\ud800"])
def test_what_json_cannot_hold_makes_no_id(value: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever Python calls it
        derived_id("payments", "Debit", [value])


def test_the_example_of_the_documentation_is_right() -> None:
    assert doctest.testmod(ids).failed == 0
