from __future__ import annotations

from typing import Any

from commandbus import Command, Context, command_handler


@command_handler("payments", "SendSummary")
def send_summary(command: Command, context: Context) -> dict[str, Any]:
    """Sent when all payouts of a batch have ended. The reply has what somebody would be sent."""
    batch = command.data["batch"]
    return {"summary": f"{batch['name']}: {batch['completed_count']} of {batch['total_count']} payouts are done"}
