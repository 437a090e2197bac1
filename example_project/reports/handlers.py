from __future__ import annotations

import asyncio
from typing import Any

from commandbus import Command, Context, command_handler


@command_handler("reports", "RenderReport", transactional=False)
async def render_report(command: Command, context: Context) -> dict[str, Any]:
    """Only outside I/O: no transaction is held while it waits."""
    await asyncio.sleep(0.05)
    return {"url": f"https://reports.example/{command.data['month']}.pdf"}
