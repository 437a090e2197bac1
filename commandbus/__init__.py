"""A reliable command bus for Django teams whose only infrastructure is PostgreSQL."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commandbus.exceptions import (
    BusinessRuleError,
    CommandBusError,
    CommandCanceled,
    CommandRefusedError,
    ConfigurationError,
    DuplicateCommandError,
    InvalidCommandError,
    PermanentCommandError,
    TransientCommandError,
    UnknownDomainError,
    UnknownQueueError,
    UnsupportedIsolationLevelError,
)
from commandbus.messages import Command, NewCommand, Status
from commandbus.policies import RetryPolicy

if TYPE_CHECKING:
    from commandbus.api import (
        asend_command,
        audit_trail,
        cancel_command,
        get_command,
        list_commands,
        pause_domain,
        resume_domain,
        send_command,
        send_commands,
    )
    from commandbus.bus import CommandBus
    from commandbus.handlers import command_handler
    from commandbus.worker.context import Context

__version__ = "0.1.0"

# These need Django's settings or models, which are not ready when Django imports this package.
_LATER = {
    "CommandBus": "commandbus.bus",
    "Context": "commandbus.worker.context",
    "asend_command": "commandbus.api",
    "audit_trail": "commandbus.api",
    "cancel_command": "commandbus.api",
    "command_handler": "commandbus.handlers",
    "get_command": "commandbus.api",
    "list_commands": "commandbus.api",
    "pause_domain": "commandbus.api",
    "resume_domain": "commandbus.api",
    "send_command": "commandbus.api",
    "send_commands": "commandbus.api",
}

__all__ = [
    "BusinessRuleError",
    "Command",
    "CommandBus",
    "CommandBusError",
    "CommandCanceled",
    "CommandRefusedError",
    "ConfigurationError",
    "Context",
    "DuplicateCommandError",
    "InvalidCommandError",
    "NewCommand",
    "PermanentCommandError",
    "RetryPolicy",
    "Status",
    "TransientCommandError",
    "UnknownDomainError",
    "UnknownQueueError",
    "UnsupportedIsolationLevelError",
    "asend_command",
    "audit_trail",
    "cancel_command",
    "command_handler",
    "get_command",
    "list_commands",
    "pause_domain",
    "resume_domain",
    "send_command",
    "send_commands",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'commandbus' has no attribute {name!r}")
