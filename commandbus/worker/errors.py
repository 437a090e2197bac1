"""Errors as they are stored and shown."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from types import TracebackType

from commandbus.exceptions import InvalidDataError
from commandbus.messages import ERROR_TEXT_LIMIT, ErrorInfo, printable, storable

FIELDS_KEPT = 50
"""Of how many wrong fields of one command the errors are kept, if they are not too long."""


def error_info(error: BaseException) -> ErrorInfo:
    """Whatever it is, and however badly it behaves."""
    name = type(error).__name__
    code, message, details = (_attribute(error, attribute) for attribute in ("code", "message", "details"))
    try:
        trace = "".join(traceback.format_exception(type(error), error, _handlers_frames(error)))
    except Exception:  # noqa: BLE001 - the traceback shows the error, which may raise when it is shown
        trace = "".join(traceback.format_tb(_handlers_frames(error)))
    return ErrorInfo(
        type=name,
        code=name if code is None else printable(code),
        message=printable(error if message is None else message),
        details=details if isinstance(details, Mapping) else None,
        traceback=trace,
    )


def invalid_data_info(error: InvalidDataError) -> ErrorInfo:
    kept: list[dict[str, str]] = []
    room = ERROR_TEXT_LIMIT - 100  # longer details would be kept as text only
    for field, message in error.errors[:FIELDS_KEPT]:
        one = {"field": storable(field, 300), "message": storable(message, 300)}
        room -= len(json.dumps(one)) + 2
        if room >= 0:
            kept.append(one)
    shown = [f"{one['field']}: {one['message']}" if one["field"] else one["message"] for one in kept]
    if len(error.errors) > len(kept):
        shown.append(f"and {len(error.errors) - len(kept)} more")
    return ErrorInfo("InvalidData", "INVALID_DATA", "; ".join(shown), {"errors": kept})


def _attribute(error: BaseException, name: str) -> object:
    try:
        return getattr(error, name, None)
    except Exception:  # noqa: BLE001 - it may be a property of the application's
        return None


def _handlers_frames(error: BaseException) -> TracebackType | None:
    """The traceback from the handler on: how we called it is of no interest to who reads it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(("commandbus.", "asgiref.")):
        frames = frames.tb_next
    return frames or error.__traceback__
