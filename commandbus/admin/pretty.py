"""JSON and long texts as a page can show them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder

MOST_CHARACTERS = 200_000


@dataclass(frozen=True)
class Text:
    text: str
    left_out: int = 0
    """Characters that are not shown."""

    @property
    def lines(self) -> int:
        return self.text.rstrip("\n").count("\n") + 1

    @property
    def is_long(self) -> bool:
        return self.lines > 12 or len(self.text) > 2_000


def pretty(value: Any) -> Text:
    try:
        return shortened(json.dumps(value, indent=2, ensure_ascii=False, cls=DjangoJSONEncoder))
    except RecursionError:
        return Text("nested too deeply to be shown")


def shortened(text: str) -> Text:
    """The beginning and the end of what is too long: the end of a traceback says what went wrong."""
    if len(text) <= MOST_CHARACTERS:
        return Text(text)
    left_out, half = len(text) - MOST_CHARACTERS, MOST_CHARACTERS // 2
    return Text(f"{text[:half]}\n… {left_out:,} characters left out …\n{text[-half:]}", left_out)
