from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.apps import AppConfig

from commandbus import Command, RetryPolicy, command_handler
from commandbus.exceptions import ConfigurationError
from commandbus.handlers import Handler, HandlerRegistry, discover


def nothing(command: Any, context: Any) -> None:
    pass


def test_two_handlers_for_one_type_are_an_error_that_names_both(commandbus_handlers: HandlerRegistry) -> None:
    @command_handler("orders", "Twice")
    def first(command: Any, context: Any) -> None: ...

    with pytest.raises(ConfigurationError) as caught:

        @command_handler("orders", "Twice")
        def second(command: Any, context: Any) -> None: ...

    assert "orders/Twice has two handlers" in str(caught.value)
    assert "first" in str(caught.value)
    assert "second" in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"domain": "Not Valid"}, "domain name"),
        ({"command_type": ""}, "1 to 255 characters"),
        ({"timeout": 0}, "timeout must be above 0"),
        ({"timeout": "x"}, "timeout must be above 0 and up to 3155760000 seconds, not 'x'"),
        ({"batch_size": 2.5}, "batch_size must be from 1 to 10000, not 2.5"),
        ({"batch_size": "x"}, "batch_size must be from 1 to 10000, not 'x'"),
        ({"retry_policy": 3}, "retry_policy must be a RetryPolicy, not 3"),
        ({"batch_size": 0}, "batch_size must be from 1"),
        ({"function": lambda command: None}, "must take two arguments"),
    ],
)
def test_a_wrong_handler_is_refused_where_it_is_declared(wrong: dict[str, Any], words: str) -> None:
    right = {"domain": "orders", "command_type": "X", "function": nothing}
    with pytest.raises(ConfigurationError, match=words):
        HandlerRegistry().register(Handler(**{**right, **wrong}))


def test_any_callable_can_be_a_handler() -> None:
    handlers = HandlerRegistry()
    handlers.register(Handler("orders", "Partial", functools.partial(nothing)))
    with pytest.raises(ConfigurationError, match=r"functools\.partial"):
        handlers.register(Handler("orders", "Partial", nothing))


def test_a_handler_without_a_policy_takes_the_default() -> None:
    assert Handler("orders", "X", nothing).policy == RetryPolicy()
    assert Handler("orders", "X", nothing, RetryPolicy(max_attempts=7)).policy.max_attempts == 7


@dataclass
class Picture:
    title: str
    pixels: bytes


def show(command: Command[Picture], context: Any) -> None: ...


def test_a_handler_whose_data_cannot_be_read_is_refused_where_it_is_declared() -> None:
    with pytest.raises(ConfigurationError) as caught:
        HandlerRegistry().register(Handler("orders", "Show", show))
    assert "handler tests.test_handlers.show for orders/Show: Picture.pixels has the type bytes" in str(caught.value)


def test_a_handler_whose_annotation_cannot_be_resolved_is_refused_where_it_is_declared() -> None:
    class Local:
        pass

    def handle(command: Command[Local], context: Any) -> None: ...

    with pytest.raises(ConfigurationError) as caught:
        HandlerRegistry().register(Handler("orders", "X", handle))
    assert "handle for orders/X: its annotation Command[Local] cannot be resolved" in str(caught.value)
    assert "import them at run time" in str(caught.value)


TYPED_HANDLER = """
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from commandbus import Command, command_handler

if TYPE_CHECKING:
    from commandbus import Context

@dataclass
class Debit:
    amount: int

@command_handler("orders", "FoundTyped")
def found(command: Command[Debit], context: Context) -> None: ...
"""


@pytest.mark.parametrize("app", [{"handlers.py": TYPED_HANDLER}], indirect=True)
def test_a_class_above_its_handler_is_found_while_the_module_is_imported(
    app: AppConfig, commandbus_handlers: HandlerRegistry
) -> None:
    discover([app], "handlers")
    handler = commandbus_handlers.get("orders", "FoundTyped")
    assert handler is not None
    assert handler.read is not None
    assert handler.read({"amount": 3}).amount == 3


def test_an_untyped_handler_reads_nothing() -> None:
    handlers = HandlerRegistry()
    handlers.register(Handler("orders", "X", nothing))
    handler = handlers.get("orders", "X")
    assert handler is not None
    assert handler.read is None


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[AppConfig]:
    """An app in a folder of its own, with the handlers module that the test asks for."""
    name = f"app_{abs(hash(request.node.name))}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    for path, text in request.param.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = AppConfig.create(name)
    yield config
    for module in [m for m in sys.modules if m.startswith(name)]:
        del sys.modules[module]


@pytest.mark.parametrize("app", [{"handlers.py": "import commandbus, no_such_module"}], indirect=True)
def test_an_import_error_names_app_and_module(app: AppConfig) -> None:
    with pytest.raises(ConfigurationError) as caught:
        discover([app], "handlers")
    assert f"app '{app.label}'" in str(caught.value)
    assert f"module {app.name}.handlers" in str(caught.value)
    assert "no_such_module" in str(caught.value)


@pytest.mark.parametrize("app", [{"handlers.py": "raise RuntimeError('somebody else')"}], indirect=True)
def test_a_module_of_that_name_in_another_app_does_no_harm(app: AppConfig) -> None:
    assert discover([app], "handlers") == []


@pytest.mark.parametrize("app", [{}], indirect=True)
def test_an_app_without_handlers_is_fine(app: AppConfig) -> None:
    assert discover([app], "handlers") == []
    assert discover([app], "no.such.package") == []


HANDLER = """
from commandbus import command_handler

@command_handler("orders", "Found{0}")
def found(command, context): ...
"""


@pytest.mark.parametrize(
    "app",
    [
        {"handlers/__init__.py": "from . import one", "handlers/one.py": HANDLER.format("InPackage")},
    ],
    indirect=True,
)
def test_handlers_in_a_package_are_found(app: AppConfig, commandbus_handlers: HandlerRegistry) -> None:
    assert discover([app], "handlers") == [f"{app.name}.handlers"]
    assert commandbus_handlers.get("orders", "FoundInPackage") is not None


@pytest.mark.parametrize("app", [{"handlers.py": HANDLER.format("A") + HANDLER.format("A")}], indirect=True)
def test_a_duplicate_registration_is_reported_as_such(app: AppConfig, commandbus_handlers: HandlerRegistry) -> None:
    with pytest.raises(ConfigurationError, match="two handlers"):
        discover([app], "handlers")


@pytest.mark.parametrize("app", [{"commands.py": HANDLER.format("Elsewhere")}], indirect=True)
def test_the_module_name_is_configurable(app: AppConfig, commandbus_handlers: HandlerRegistry) -> None:
    assert discover([app], "commands") == [f"{app.name}.commands"]
