"""The call of a handler: sync or async, within its time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from asgiref.sync import async_to_sync

from commandbus.exceptions import TransientCommandError
from commandbus.handlers import Handler, HandlerFunction


def call(handler: Handler, *arguments: object) -> Any:
    """Call the handler and hold it to its timeout. A coroutine is interrupted; a function is judged when it returns."""
    function, timeout = handler.function, handler.timeout
    started = time.monotonic()
    try:
        if handler.is_async:
            return async_to_sync(_within)(timeout, function, *arguments)
        result = function(*arguments)
    except TimeoutError as error:
        if timeout is None or time.monotonic() - started < timeout:
            raise  # the handler's own
        raise timed_out(handler) from error
    if timeout is not None and time.monotonic() - started > timeout:
        raise timed_out(handler)
    return result


async def _within(timeout: float | None, function: HandlerFunction, *arguments: object) -> Any:
    async with asyncio.timeout(timeout):
        return await function(*arguments)


def timed_out(handler: Handler) -> TransientCommandError:
    return TransientCommandError("TIMEOUT", f"the handler {handler.name} took longer than {handler.timeout} seconds")
