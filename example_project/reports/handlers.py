from __future__ import annotations

import asyncio
from typing import Any

from commandbus import Command, Context, command_handler
from example_project.reports.models import Report


@command_handler("reports", "RenderReport")
async def render_report(command: Command, context: Context) -> dict[str, Any]:
    """On the database of its domain, `context.using`: there its effect and its end commit together."""
    await asyncio.sleep(0.01)
    report = await Report.objects.using(context.using).acreate(
        command_id=command.command_id, month=command.data["month"]
    )
    return {"url": f"https://reports.example/{report.month}.pdf"}


@command_handler("reports", "BindReports")
def bind_reports(command: Command, context: Context) -> dict[str, Any]:
    """Sent when all reports of a batch are there."""
    batch = command.data["batch"]
    report = Report.objects.using(context.using).create(command_id=command.command_id, month=batch["name"])
    return {"url": f"https://reports.example/{report.command_id}.pdf", "reports": batch["completed_count"]}
