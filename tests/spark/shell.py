"""`manage.py commandbus_spark send` in this process, and what it has sent."""

from __future__ import annotations

import io
from typing import Any
from uuid import UUID

from django.core.management import call_command

from commandbus.models import Command
from commandbus.transitions import PostgresTransitions

CSV = 'invoice,account,amount,delay\n2026-1,DE-1,10.00,\n2026-2,"D""E",,60\n'


def send(*arguments: str, domain: str = "orders") -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    try:
        call_command("commandbus_spark", "send", "--domain", domain, *arguments, stdout=out, stderr=err)
    except SystemExit as stop:
        code = stop.code
    return int(code), out.getvalue(), err.getvalue()


def payloads() -> dict[UUID, Any]:
    ids = list(Command.objects.values_list("command_id", flat=True))
    return PostgresTransitions("default").payloads("orders", ids)
