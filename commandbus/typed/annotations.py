"""Which data a handler asks for: the annotation of its first parameter says it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args, get_origin, get_type_hints

from commandbus.exceptions import ConfigurationError
from commandbus.messages import Command

REMEDY = "define its names at the top level of a module and import them at run time, not only under TYPE_CHECKING"


def data_type(function: Callable[..., Any], *, bulk: bool) -> Any:
    """`Debit` for `command: Command[Debit]`, or of a bulk handler `commands: list[Command[Debit]]`; None for a dict."""
    annotation = _resolved(function, _first_annotation(function))
    if not _mentions_command(annotation):
        return None
    command = annotation
    if bulk:
        kind = get_origin(annotation)
        command = get_args(annotation)[0] if isinstance(kind, type) and issubclass(list, kind) else None
    if get_origin(command) is not Command:
        wanted = "list[Command[…]] with a batch_size" if bulk else "Command[…] without a batch_size"
        raise ConfigurationError(f"its first parameter is annotated {annotation}; it must be {wanted}")
    [data] = get_args(command)
    return None if data in (Any, dict, dict[str, Any]) else data


def _first_annotation(function: Callable[..., Any]) -> Any:
    first = next(iter(inspect.signature(function).parameters.values()))
    return Any if first.kind is first.VAR_POSITIONAL or first.annotation is first.empty else first.annotation


def _resolved(function: Callable[..., Any], annotation: Any) -> Any:
    """The annotation without strings; Any if that cannot be had and it is none of ours."""
    only = SimpleNamespace(__annotations__={"first": annotation})  # the others need not be known at run time
    try:
        return get_type_hints(only, _namespace(function))["first"]
    except Exception as error:
        if "Command[" not in str(annotation):
            return Any
        raise ConfigurationError(f"its annotation {annotation} cannot be resolved: {error}; {REMEDY}") from error


def _namespace(function: Any) -> dict[str, Any]:
    """Of the module that the signature was written in, however the function is wrapped."""
    while True:
        if isinstance(function, partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif inspect.isfunction(function):
            return function.__globals__
        elif inspect.isfunction(type(function).__call__):
            function = type(function).__call__
        else:
            return {}


def _mentions_command(annotation: Any) -> bool:
    return get_origin(annotation) is Command or any(map(_mentions_command, get_args(annotation)))
