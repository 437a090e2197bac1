"""What the benchmark's commands do: nothing, one insert, or one insert for many."""

from __future__ import annotations

from django.db import connection

from benchmarks.counter import Counter
from commandbus import Command, Context, command_handler

counter = Counter()


@command_handler("bench", "io", transactional=False)
def io(command: Command, context: Context) -> None:
    counter.handled()


@command_handler("bench", "default")
def default(command: Command, context: Context) -> None:
    counter.handled()
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO effect (n, account) VALUES (%s, %s)", [command.data["n"], command.data["account"]])


@command_handler("bench", "bulk", batch_size=500)
def bulk(commands: list[Command], context: Context) -> None:
    counter.handled(len(commands))
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO effect (n, account) SELECT * FROM unnest(%s::int[], %s::text[])",
            [[command.data["n"] for command in commands], [command.data["account"] for command in commands]],
        )
