"""What an operator does: look at the Troubleshooting Queue, and retry, edit, cancel or complete what is in it."""

from commandbus.ops.troubleshooting import (
    EVERYTHING,
    ActionResult,
    Progress,
    TroubleshootingFilter,
    Which,
    get_payload,
    in_troubleshooting,
    list_troubleshooting,
    operator_cancel,
    operator_cancel_many,
    operator_complete,
    operator_complete_many,
    operator_edit,
    operator_edit_many,
    operator_retry,
    operator_retry_many,
)

__all__ = [
    "EVERYTHING",
    "ActionResult",
    "Progress",
    "TroubleshootingFilter",
    "Which",
    "get_payload",
    "in_troubleshooting",
    "list_troubleshooting",
    "operator_cancel",
    "operator_cancel_many",
    "operator_complete",
    "operator_complete_many",
    "operator_edit",
    "operator_edit_many",
    "operator_retry",
    "operator_retry_many",
]
