"""The handlers: how they are declared, found and looked up."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from django.apps import AppConfig

from commandbus import conf
from commandbus.exceptions import ConfigurationError
from commandbus.messages import Command, Reply
from commandbus.policies import LONGEST, RetryPolicy, is_between
from commandbus.typed import Reader, data_type, reader_of

logger = logging.getLogger(__name__)

ANY_REPLY = "*"
"""In place of a command type: a reply handler takes those of all."""

HandlerFunction = Callable[..., Any]
F = TypeVar("F", bound=HandlerFunction)


@dataclass(frozen=True, slots=True)
class Handler:
    domain: str
    command_type: str
    function: HandlerFunction
    retry_policy: RetryPolicy | None = None
    transactional: bool = True
    timeout: float | None = None
    batch_size: int | None = None
    share_transaction: bool = True
    replies: bool = False
    """It handles what arrives in the domain's reply queue."""
    # Known once it is registered:
    read: Reader | None = field(default=None, compare=False)
    """Makes the data what the function's annotation says; None if that is a dict."""
    is_async: bool = field(default=False, compare=False)

    @property
    def policy(self) -> RetryPolicy:
        return self.retry_policy or conf.current().retry_policy

    @property
    def may_share_transaction(self) -> bool:
        """Whether quick calls of it may run in one transaction. A bulk handler has one for its many commands anyway."""
        return self.transactional and self.share_transaction and self.batch_size is None

    @property
    def name(self) -> str:
        name = getattr(self.function, "__qualname__", None)
        return repr(self.function) if name is None else f"{self.function.__module__}.{name}"


class HandlerRegistry:
    """At most one handler per domain and command type, and one per domain for its replies."""

    def __init__(self) -> None:
        self._handlers: dict[tuple[str, str], Handler] = {}
        self._reply_handlers: dict[str, Handler] = {}

    def register(self, handler: Handler) -> None:
        _check(handler)
        key = (handler.domain, handler.command_type)
        other = self._reply_handlers.get(handler.domain) if handler.replies else self._handlers.get(key)
        if other is not None:
            raise ConfigurationError(
                f"{handler.domain}/{handler.command_type} has two handlers: {other.name} and {handler.name}; keep one"
            )
        handler = replace(handler, read=_reader(handler), is_async=inspect.iscoroutinefunction(handler.function))
        if handler.replies:
            self._reply_handlers[handler.domain] = handler
        else:
            self._handlers[key] = handler

    def get(self, domain: str, command_type: str) -> Handler | None:
        return self._handlers.get((domain, command_type))

    def of(self, command: Command) -> Handler | None:
        """The handler of a command that was received, or of a reply."""
        if not self._reply_handlers:
            return self.get(command.domain, command.command_type)
        owners = {handler.domain: handler for handler in self.of_replies(command.domain)}
        if not owners:
            return self.get(command.domain, command.command_type)
        if conf.current().reply_queue is None:
            return next(iter(owners.values()))  # its own queue, whoever replies there
        return owners.get(command.command_type.partition("/")[0])

    def of_replies(self, queue: str) -> list[Handler]:
        """The handlers of the domains whose reply queue this is."""
        config = conf.current()
        return [h for domain, h in sorted(self._reply_handlers.items()) if config.reply_queue_of(domain) == queue]

    def handled_in(self, domain: str) -> list[str]:
        """What a node says that it handles: command types; in a reply queue "*", or the domains that share it."""
        handlers = self.in_domain(domain)
        if conf.current().reply_queue is None:
            return [handler.command_type for handler in handlers]
        return [handler.domain if handler.replies else handler.command_type for handler in handlers]

    def reply_domains(self) -> set[str]:
        return set(self._reply_handlers)

    def domains(self) -> set[str]:
        return {domain for domain, _ in self._handlers} | self.reply_domains()

    def in_domain(self, domain: str) -> list[Handler]:
        """Of a domain, or of a reply queue."""
        handlers = [handler for (name, _), handler in sorted(self._handlers.items()) if name == domain]
        return handlers or self.of_replies(domain)

    def copy(self) -> HandlerRegistry:
        other = HandlerRegistry()
        other.replace_with(self)
        return other

    def replace_with(self, other: HandlerRegistry) -> None:
        self._handlers = dict(other._handlers)
        self._reply_handlers = dict(other._reply_handlers)


registry = HandlerRegistry()


def command_handler(
    domain: str,
    command_type: str,
    *,
    retry_policy: RetryPolicy | None = None,
    transactional: bool = True,
    timeout: float | None = None,
    batch_size: int | None = None,
    share_transaction: bool = True,
) -> Callable[[F], F]:
    """Declare the function that handles a command type: `handler(command, context)`, sync or async.

    By default it runs in a transaction that also ends the command: its effects in this database happen exactly once.
    `transactional=False` is for handlers that only do outside I/O; they run at least once.
    With `batch_size` it gets a list of up to that many commands and one transaction: `handler(commands, context)`.
    `timeout` is in seconds; a handler that takes longer has failed and is tried again.
    A `command: Command[Debit]` gets its data as a Debit, which is a dataclass or a pydantic model (in bulk
    `commands: list[Command[Debit]]`). Data that does not fit goes to the Troubleshooting Queue.
    Where calls are quick, several may share a transaction, each in a savepoint; whoever fails there is run again alone,
    and only that counts. `share_transaction=False` gives each its own, for a handler that relies on that: because it
    locks rows in any order, or sets something for the whole transaction.
    """

    def register(function: F) -> F:
        registry.register(
            Handler(domain, command_type, function, retry_policy, transactional, timeout, batch_size, share_transaction)
        )
        return function

    return register


def reply_handler(
    domain: str,
    *,
    retry_policy: RetryPolicy | None = None,
    transactional: bool = True,
    timeout: float | None = None,
    batch_size: int | None = None,
    share_transaction: bool = True,
) -> Callable[[F], F]:
    """Declare the function that handles what arrives in a domain's reply queue: `handler(reply, context)`.

    It has the same choices and guarantees as a command handler, and runs in `commandbus_worker --replies <domain>`.
    Where several domains share a reply queue, it gets the replies to the commands of its own.
    """

    def register(function: F) -> F:
        registry.register(
            Handler(
                domain,
                ANY_REPLY,
                function,
                retry_policy,
                transactional,
                timeout,
                batch_size,
                share_transaction,
                replies=True,
            )
        )
        return function

    return register


def _check(handler: Handler) -> None:
    what = _what(handler)
    conf.check_domain_name(handler.domain)
    if not isinstance(handler.command_type, str) or not 1 <= len(handler.command_type) <= 255:
        raise ConfigurationError(f"{what}: the command type must have 1 to 255 characters")
    if not isinstance(handler.retry_policy, RetryPolicy | None):
        raise ConfigurationError(f"{what}: retry_policy must be a RetryPolicy, not {handler.retry_policy!r}")
    if handler.timeout is not None and not (handler.timeout and is_between(handler.timeout, 0, LONGEST)):
        raise ConfigurationError(
            f"{what}: timeout must be above 0 and up to {LONGEST} seconds, not {handler.timeout!r}"
        )
    size = handler.batch_size
    if size is not None and not (isinstance(size, int) and is_between(size, 1, 10_000)):
        raise ConfigurationError(f"{what}: batch_size must be from 1 to 10000, not {handler.batch_size!r}")
    try:
        inspect.signature(handler.function).bind(object(), object())
    except TypeError:
        raise ConfigurationError(f"{what} must take two arguments: command and context") from None


def _reader(handler: Handler) -> Reader | None:
    if handler.replies:
        return Reply.from_json
    try:
        kind = data_type(handler.function, bulk=handler.batch_size is not None)
        return None if kind is None else reader_of(kind)
    except ConfigurationError as error:
        raise ConfigurationError(f"{_what(handler)}: {error}") from error


def _what(handler: Handler) -> str:
    return f"handler {handler.name} for {handler.domain}/{handler.command_type}"


def discover(apps: Iterable[AppConfig], module_name: str) -> list[str]:
    """Import each app's handlers. A module of that name that does not mention commandbus is somebody else's."""
    found = []
    for app in apps:
        name = f"{app.name}.{module_name}"
        if not _mentions_commandbus(name):
            continue
        try:
            importlib.import_module(name)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"the handlers of app {app.label!r} cannot be imported: module {name}: {type(error).__name__}: {error}"
            ) from error
        found.append(name)
    return found


def _mentions_commandbus(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False
    if spec is None or spec.origin is None:
        return False
    if spec.submodule_search_locations:
        files = [file for place in spec.submodule_search_locations for file in Path(place).rglob("*.py")]
    else:
        files = [Path(spec.origin)]
    return any(b"commandbus" in file.read_bytes() for file in files if file.suffix == ".py")
