from __future__ import annotations

from typing import Any

import pytest

from commandbus import InvalidCommandError
from commandbus.masking import MASK, TOO_DEEP, masked, unmasked

KEYS = ("password", "Token")
DATA = {"user": "ada", "Password": "p", "cards": [{"token": {"id": 1}, "name": "visa"}, {"name": "none"}]}
SHOWN = {"user": "ada", "Password": MASK, "cards": [{"token": MASK, "name": "visa"}, {"name": "none"}]}


def test_values_are_masked_at_any_depth_and_in_any_case() -> None:
    assert masked(DATA, KEYS) == SHOWN
    assert DATA["Password"] == "p"
    assert masked(DATA, ()) == DATA
    assert masked(None, KEYS) is None


def test_what_was_masked_comes_back_and_what_was_written_stays() -> None:
    assert unmasked(SHOWN, DATA, KEYS) == DATA
    assert unmasked({**SHOWN, "user": "bob", "Password": "new"}, DATA, KEYS) == {
        **DATA,
        "user": "bob",
        "Password": "new",
    }
    assert unmasked({"note": MASK, "more": 1}, {"note": MASK}, KEYS) == {"note": MASK, "more": 1}  # its own

    one = {"cards": [{"token": "t", "name": "visa"}]}
    edited = {"cards": [{"token": MASK, "name": "Visa"}]}
    assert unmasked(edited, one, KEYS) == {"cards": [{"token": "t", "name": "Visa"}]}


def test_json_within_a_text_is_masked_too() -> None:
    text = '{"password": "p", "user": "ada"}'
    shown = masked({"body": text}, KEYS)
    assert shown == {"body": f'{{"password": "{MASK}", "user": "ada"}}'}
    assert unmasked({**shown, "more": 1}, {"body": text}, KEYS) == {"body": text, "more": 1}
    assert masked(["[1, 2", "[1, 2]"], KEYS) == ["[1, 2", "[1, 2]"]
    with pytest.raises(InvalidCommandError, match="body"):
        unmasked({"body": shown["body"].replace("ada", "bob")}, {"body": text}, KEYS)


@pytest.mark.parametrize(
    "text",
    [
        ' {"token": "s3cr3t"}',
        '{"a": {"token": "s3cr3t"}, "a": 1}',
        '{"token": "s3cr3t", "n": 1' + 5000 * "0" + "}",
        '"{\\"token\\": \\"s3cr3t\\"}"',
        '{"body": "{\\"token\\": \\"s3cr3t\\"}"}',
        "{'token': 's3cr3t'}",
        '{"detail": "bad", "Token": "s3cr3t", "and so',
    ],
)
def test_what_only_looks_like_json_shows_no_value_either(text: str) -> None:
    assert "s3cr3t" not in masked(text, KEYS)
    assert unmasked({"body": masked(text, KEYS), "n": 1}, {"body": text}, KEYS) == {"body": text, "n": 1}


def test_texts_without_such_keys_are_shown() -> None:
    texts = ["[Errno 28] no space for the token: 'x'", "{not json}", '"quoted"', '{"n": 1, "n": 2}', "plain: password"]
    assert masked(texts, KEYS) == texts
    assert masked(["{'token': 1}"], ()) == ["{'token': 1}"]


@pytest.mark.parametrize(("before", "after"), [(1, True), (False, 0), (5.0, 5), ([1], [True]), ({"b": 1}, {"b": 1.0})])
def test_another_type_is_another_value(before: Any, after: Any) -> None:
    read = unmasked({"a": after}, {"a": before}, KEYS)["a"]
    assert repr(read) == repr(after)


def test_what_is_nested_too_deeply_is_not_shown() -> None:
    deep: Any = "x"
    for _ in range(3000):
        deep = [deep]
    assert masked(deep, KEYS) == TOO_DEEP
    with pytest.raises(InvalidCommandError, match="too deeply"):
        unmasked({"a": deep}, {}, KEYS)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"token": MASK}, "token"),
        ({"cards": [{"token": MASK}]}, r"cards\[0\]\.token"),  # the list has become shorter: whose token is it?
        ({"cards": [{"name": "visa"}, {"token": MASK}]}, r"cards\[1\]\.token"),
        ({"cards": [{"name": "none"}, {"token": MASK, "name": "visa"}]}, r"cards\[1\]\.token"),  # they were moved
        ({"user": {"password": MASK}}, r"user\.password"),
        ({"note": MASK}, "note"),
        ({"user": f'{{"token": "{MASK}", "n": 2}}'}, "user"),
        ({"user": ["b", f'{{"token": "{MASK}"}}']}, r"user\[1\]"),
    ],
)
def test_a_mask_of_which_one_is_not_sure_is_refused(value: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidCommandError, match=where):
        unmasked(value, DATA, KEYS)
