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
    LeaseLostError,
    PermanentCommandError,
    ReplyTimeoutError,
    TransactionMismatchError,
    TransientCommandError,
    UncommittedCommandError,
    UnknownCommandError,
    UnknownDomainError,
    UnknownQueueError,
    UnsupportedIsolationLevelError,
)
from commandbus.ids import uuid7
from commandbus.messages import Command, NewCommand, Reply, ReplyError, ReplyOutcome, Status
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
    from commandbus.handlers import command_handler, reply_handler
    from commandbus.replies import asend_command_and_wait, await_for_reply, send_command_and_wait, wait_for_reply
    from commandbus.worker.context import Context

__version__ = "0.1.0"

# These need Django's settings or models, which are not ready when Django imports this package.
_LATER = {
    "CommandBus": "commandbus.bus",
    "Context": "commandbus.worker.context",
    "asend_command": "commandbus.api",
    "asend_command_and_wait": "commandbus.replies",
    "await_for_reply": "commandbus.replies",
    "audit_trail": "commandbus.api",
    "cancel_command": "commandbus.api",
    "command_handler": "commandbus.handlers",
    "get_command": "commandbus.api",
    "list_commands": "commandbus.api",
    "pause_domain": "commandbus.api",
    "reply_handler": "commandbus.handlers",
    "resume_domain": "commandbus.api",
    "send_command": "commandbus.api",
    "send_command_and_wait": "commandbus.replies",
    "send_commands": "commandbus.api",
    "wait_for_reply": "commandbus.replies",
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
    "LeaseLostError",
    "NewCommand",
    "PermanentCommandError",
    "Reply",
    "ReplyError",
    "ReplyOutcome",
    "ReplyTimeoutError",
    "RetryPolicy",
    "Status",
    "TransactionMismatchError",
    "TransientCommandError",
    "UncommittedCommandError",
    "UnknownCommandError",
    "UnknownDomainError",
    "UnknownQueueError",
    "UnsupportedIsolationLevelError",
    "asend_command",
    "asend_command_and_wait",
    "audit_trail",
    "await_for_reply",
    "cancel_command",
    "command_handler",
    "get_command",
    "list_commands",
    "pause_domain",
    "reply_handler",
    "resume_domain",
    "send_command",
    "send_command_and_wait",
    "send_commands",
    "uuid7",
    "wait_for_reply",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'commandbus' has no attribute {name!r}")
