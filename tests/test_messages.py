from __future__ import annotations

import json
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandbus.encoding import json_object, parse_json
from commandbus.exceptions import InvalidCommandError
from commandbus.messages import ERROR_TEXT_LIMIT, ErrorInfo, storable


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "data must be a JSON object"),
        ("text", "data must be a JSON object"),
        (None, "data must be a JSON object"),
        ({"a": float("nan")}, "data.a is nan"),
        ({"a": {"b": [1, float("inf")]}}, "data.a.b[1] is inf"),
        ({"a": "x\x00y"}, "data.a holds the character \\u0000"),
        ({"a\x00": 1}, "\\u0000"),
        ({1: "x"}, "data has the key 1; JSON keys are strings, use '1'"),
        ({"tags": {"a", "b"}}, "data.tags is a set"),
        ({"when": datetime(2026, 1, 1, tzinfo=UTC)}, "data.when is a datetime"),
        ({"raw": b"x"}, "data.raw is a bytes"),
        ({"a": "\ud800"}, "half a surrogate pair"),
        ({"a": 10**5000}, "cannot be written as JSON"),
    ],
)
def test_what_json_cannot_hold_is_named_with_its_place(data: Any, words: str) -> None:
    with pytest.raises(InvalidCommandError) as caught:
        json_object(data, "data")
    assert words in str(caught.value)


def test_data_that_contains_itself_is_refused() -> None:
    data: dict[str, Any] = {}
    data["self"] = data
    with pytest.raises(InvalidCommandError, match="nested too deeply, or contains itself"):
        json_object(data, "data")


def test_any_mapping_and_any_sequence_are_json() -> None:
    assert json.loads(json_object(MappingProxyType({"a": (1, range(2))}), "data")) == {"a": [1, [0, 1]]}


texts = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=20,
)


@given(st.dictionaries(texts, json_values))
def test_accepted_data_survives_the_journey_unchanged(data: dict[str, Any]) -> None:
    text = json_object(data, "data")
    assert json.loads(text) == data
    assert repr(parse_json(text)) == repr(json.loads(text))
    assert "\\u0000" not in text.replace("\\\\", "")


@given(st.text(alphabet=st.characters()), st.booleans())
def test_error_texts_of_any_content_become_storable(text: str, keep_end: bool) -> None:
    stored = storable(text, 50, keep_end=keep_end)
    assert len(stored) <= 50
    assert "\x00" not in stored
    stored.encode()


def test_a_long_error_text_is_cut_with_a_mark_that_tells_its_length() -> None:
    stored = storable("x" * 20_000)
    assert len(stored) == ERROR_TEXT_LIMIT
    assert stored.endswith("… [cut: 20000 characters]")
    assert storable("head" + "x" * 20_000 + "tail", keep_end=True).endswith("tail")


def test_error_details_that_are_no_json_are_kept_as_text() -> None:
    info = ErrorInfo("T", "C", "m", details={"when": {1, 2}})
    assert json.loads(info.as_json())["details"] == {"text": "{'when': {1, 2}}"}


def test_error_details_of_any_shape_and_size_are_stored() -> None:
    class Shy(dict[str, Any]):
        def __str__(self) -> str:
            raise RuntimeError("not today")

    def stored(details: Any) -> Any:
        return json.loads(ErrorInfo("T", "C", "m", details=details).as_json())["details"]

    assert stored({"items": range(3), "map": MappingProxyType({"a": 1})}) == {"items": [0, 1, 2], "map": {"a": 1}}
    assert len(stored({"a": "x" * 50_000})["text"]) == ERROR_TEXT_LIMIT
    assert stored(Shy(a={1})) == {"text": "<Shy that cannot be shown: RuntimeError>"}
    assert "cannot be shown" in stored({"a": 10**5000})["text"]
