"""Log lines that people read and machines split: an event's name, then key=value."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("commandbus.worker")


def log(level: int, event: str, **fields: Any) -> None:
    if logger.isEnabledFor(level):
        line = " ".join([event, *(f"{name}={_value(value)}" for name, value in fields.items())])
        logger.log(level, "%s", line, extra={"event": event, "fields": fields})


def show_log(verbosity: int) -> None:
    """A project that configures no logging shall see what its worker does all the same."""
    ours = logging.getLogger("commandbus")
    if verbosity > 0 and not ours.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO if verbosity == 1 else logging.DEBUG)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    text = str(value)
    return repr(text) if not text or any(character in text for character in ' "\n=') else text
