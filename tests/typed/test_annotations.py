"""Which type a handler asks for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from commandbus.exceptions import ConfigurationError
from commandbus.messages import Command
from commandbus.typed import data_type
from tests.typed.samples import (
    Debit,
)

if TYPE_CHECKING:
    from somewhere import OnlyForTypeCheckers  # type: ignore[import-not-found]


def plain(command: Command, context: Any) -> None: ...
def bare(command, context): ...  # type: ignore[no-untyped-def]
def whatever(*arguments: Any) -> None: ...
def a_dict(command: Command[dict[str, Any]], context: Any) -> None: ...
def anything(command: Command[Any], context: Any) -> None: ...
def unknown(command: OnlyForTypeCheckers, context: Any) -> None: ...
def typed(command: Command[Debit], context: OnlyForTypeCheckers) -> None: ...
def early(command: Command["Debit"], context: Any) -> None: ...  # noqa: UP037
def late(service: str, command: Command[Debit], context: Any) -> None: ...
async def later(command: Command[Debit], context: Any) -> None: ...


def in_bulk(commands: list[Command[Debit]], context: Any) -> None: ...
def in_sequence(commands: Sequence[Command[Debit]], context: Any) -> None: ...
def plainly_in_bulk(commands: list[Command], context: Any) -> None: ...


DebitCommand = Command[Debit]


def by_alias(command: DebitCommand, context: Any) -> None: ...


class Service:
    def method(self, command: Command[Debit], context: Any) -> None: ...

    @classmethod
    def of_class(cls, command: Command[Debit], context: Any) -> None: ...

    @staticmethod
    def static(command: Command[Debit], context: Any) -> None: ...

    def __call__(self, command: Command[Debit], context: Any) -> None: ...


def noisy(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*arguments: Any) -> Any:
        return function(*arguments)

    return wrapper


@pytest.mark.parametrize("function", [plain, bare, whatever, a_dict, anything, unknown, dict.get])
def test_a_handler_that_says_nothing_of_its_data_gets_a_dict(function: Any) -> None:
    assert data_type(function, bulk=False) is None


def test_a_bulk_handler_that_says_nothing_of_its_data_gets_dicts() -> None:
    assert data_type(plainly_in_bulk, bulk=True) is None
    assert data_type(bare, bulk=True) is None


@pytest.mark.parametrize(
    "function",
    [
        typed,
        early,
        later,
        by_alias,
        functools.partial(late, "service"),
        functools.partial(typed),
        Service().method,
        Service.of_class,
        Service.static,
        Service(),
        noisy(typed),
        noisy(noisy(Service().method)),
        functools.partial(noisy(late), "service"),
    ],
)
def test_the_annotation_is_found_however_the_handler_is_wrapped(function: Any) -> None:
    assert data_type(function, bulk=False) is Debit


@pytest.mark.parametrize("function", [in_bulk, in_sequence])
def test_a_bulk_handler_asks_for_lists_of_commands(function: Any) -> None:
    assert data_type(function, bulk=True) is Debit


@pytest.mark.parametrize(("function", "bulk"), [(in_bulk, False), (typed, True)])
def test_a_batch_size_and_the_annotation_must_agree(function: Any, bulk: bool) -> None:
    with pytest.raises(ConfigurationError, match=r"annotated .*Command\[.*Debit\].*; it must be .*batch_size"):
        data_type(function, bulk=bulk)


def hidden(command: Command[OnlyForTypeCheckers], context: Any) -> None: ...


def inner_class() -> Any:
    @dataclass
    class Local:
        x: int

    def handler(command: Command[Local], context: Any) -> None: ...

    return handler


@pytest.mark.parametrize(("function", "name"), [(hidden, "OnlyForTypeCheckers"), (inner_class(), "Local")])
def test_an_annotation_that_cannot_be_resolved_is_an_error_with_the_remedy(function: Any, name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        data_type(function, bulk=False)
    assert f"Command[{name}] cannot be resolved: name '{name}' is not defined" in str(caught.value)
    assert "at the top level of a module and import them at run time" in str(caught.value)


def test_a_typed_command_can_be_made() -> None:
    made = Command[Debit](uuid4(), "X", "d", uuid4(), "r", datetime.now(UTC), Debit("DE-1", 1))
    assert made.data.account == "DE-1"
