"""What an application calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import islice
from uuid import UUID

from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from commandbus import conf, transitions
from commandbus.exceptions import (
    CommandRefusedError,
    DuplicateCommandError,
    InvalidCommandError,
    TransactionMismatchError,
    UnknownDomainError,
    UnknownQueueError,
)
from commandbus.handlers import registry
from commandbus.messages import Data, NewCommand, Status, storable
from commandbus.models import Audit, Command, Domain
from commandbus.pgmq.client import PgmqClient
from commandbus.pgmq.notify import notify_sent, wakes_itself

CHUNK = 1000
LONGEST_DELAY = 100 * 365.25 * 24 * 3600

_known_domains: dict[str, set[str]] = {}
_known_queues: dict[str, set[str]] = {}


def send_command(
    domain: str,
    command_type: str,
    command_id: UUID,
    data: Data,
    *,
    reply_to: str | None = None,
    correlation_id: UUID | None = None,
    delay: float | timedelta | None = None,
    outside_transaction: bool = False,
) -> UUID:
    """Send a command in the current transaction and answer its id.

    Sending the same id with the same content again succeeds and does nothing; with other content it raises
    DuplicateCommandError. Neither breaks the transaction. `data` is a dict, or an instance of a dataclass or of a
    pydantic model. `delay` is in seconds.

    Raises TransactionMismatchError when a transaction is open, but not in the database of the domain. With
    `outside_transaction` it commits by itself then, whatever becomes of the other.
    """
    command = NewCommand(command_type, command_id, data, reply_to, correlation_id, _seconds(delay))
    return _send(domain, database_for_sending(domain, outside_transaction=outside_transaction), [command])[0]


def send_commands(domain: str, commands: Iterable[NewCommand], *, outside_transaction: bool = False) -> list[UUID]:
    """Send many commands, all or none. Takes any iterable and sends it in chunks, in one transaction."""
    using = database_for_sending(domain, outside_transaction=outside_transaction)
    remaining = iter(commands)
    sent: list[UUID] = []
    with transaction.atomic(using=using):
        while chunk := list(islice(remaining, CHUNK)):
            sent += _send(domain, using, chunk)
    return sent


async def asend_command(
    domain: str,
    command_type: str,
    command_id: UUID,
    data: Data,
    *,
    reply_to: str | None = None,
    correlation_id: UUID | None = None,
    delay: float | timedelta | None = None,
    outside_transaction: bool = False,
) -> UUID:
    """As send_command, but it commits by itself: Django has no asynchronous transactions to join."""
    return await sync_to_async(send_command)(
        domain,
        command_type,
        command_id,
        data,
        reply_to=reply_to,
        correlation_id=correlation_id,
        delay=delay,
        outside_transaction=outside_transaction,
    )


def cancel_command(domain: str, command_id: UUID, reason: str | None = None) -> None:
    """Cancel a command that waits. Raises CommandRefusedError when it runs, has ended or does not exist."""
    using = database_of(domain)
    [answer] = transitions.PostgresTransitions(using).cancel(
        domain, [uuid_of(command_id, "command_id")], None if reason is None else storable(reason)
    )
    if not answer.done:
        raise CommandRefusedError(domain, answer.command_id, answer.why or "")


def pause_domain(domain: str, *, operator: str | None = None, reason: str | None = None) -> bool:
    """Let workers receive nothing more of a domain. What runs goes on, and commands can be sent.

    Answers whether that changed anything.
    """
    return _pause(domain, True, operator, reason)


def resume_domain(domain: str, *, operator: str | None = None, reason: str | None = None) -> bool:
    return _pause(domain, False, operator, reason)


def _pause(domain: str, paused: bool, operator: str | None, reason: str | None) -> bool:
    texts = [None if text is None else storable(text) for text in (operator, reason)]
    return transitions.PostgresTransitions(database_of(domain)).pause(domain, paused, *texts)


def get_command(domain: str, command_id: UUID) -> Command | None:
    commands = Command.objects.using(database_of(domain))
    return next(iter(commands.one(domain, uuid_of(command_id, "command_id"))), None)


def list_commands(
    domain: str,
    *,
    status: Status | str | None = None,
    command_type: str | None = None,
    limit: int = 100,
    offset: int = 0,
) -> list[Command]:
    """The newest commands first."""
    every = Command.objects.using(database_of(domain))
    commands = every.filter(domain=domain) if status is None else every.with_status(domain, Status(status))
    if command_type is not None:
        commands = commands.filter(command_type=command_type)
    return list(commands.order_by("-id")[offset : offset + limit])


def audit_trail(domain: str, command_id: UUID) -> list[Audit]:
    """Everything that happened to a command, oldest first."""
    command = get_command(domain, command_id)
    if command is None:
        return []
    # The bound on ts lets PostgreSQL skip the partitions of the months before.
    events = Audit.objects.using(database_of(domain)).filter(
        domain=domain, command_id=command.command_id, ts__gte=command.created_at
    )
    return list(events.order_by("ts", "audit_id"))


def _send(domain: str, using: str, commands: list[NewCommand]) -> list[UUID]:
    verified = [checked(command, using) for command in commands]
    require_sent(domain, try_send(domain, verified))
    return [command.command_id for command in verified]


def require_sent(domain: str, outcomes: Mapping[UUID, str]) -> None:
    """Raise an error if something could not be sent."""
    conflicts = sorted(command_id for command_id, outcome in outcomes.items() if outcome == "CONFLICT")
    if conflicts:
        raise DuplicateCommandError(domain, conflicts)
    if "TOO_LARGE" in outcomes.values():
        large = next(command_id for command_id, outcome in outcomes.items() if outcome == "TOO_LARGE")
        raise transitions.too_large(large, "what PostgreSQL allows for its domain")


def try_send(domain: str, commands: Sequence[NewCommand], batch_id: UUID | None = None) -> dict[UUID, str]:
    """Send commands that are `checked`, and say what became of each: SENT, DUPLICATE, CONFLICT or TOO_LARGE.

    After one of the last two nothing of the call was written, and the transaction is as usable as before. The domain
    must have passed `database_for_sending`.
    """
    using = conf.current().database_of(domain)
    limits = {command_type: _max_attempts(domain, command_type) for command_type in {c.command_type for c in commands}}
    wake = wakes_itself(using)
    outcomes = transitions.PostgresTransitions(using).send(
        domain, commands, [limits[c.command_type] for c in commands], wake=wake, batch_id=batch_id
    )
    if "SENT" in outcomes.values() and not wake:
        notify_sent(domain, using)
    return outcomes


def _max_attempts(domain: str, command_type: str) -> int | None:
    handler = registry.get(domain, command_type)
    return None if handler is None else handler.policy.max_attempts


def checked(command: NewCommand, using: str) -> NewCommand:
    """The command with everything verified that would otherwise fail in the database and break the transaction.

    All but its data: these become text only when they are sent, and are verified there (`transitions.bodies_of`).
    """
    command_id = uuid_of(command.command_id, "command_id")
    if _is_usual(command):
        return command if command_id is command.command_id else command._replace(command_id=command_id)
    what = f"command {command_id}"
    if not isinstance(command.command_type, str) or not 1 <= len(command.command_type) <= 255:
        raise InvalidCommandError(f"{what}: the type must have 1 to 255 characters, not {command.command_type!r:.100}")
    if storable(command.command_type) != command.command_type:
        raise InvalidCommandError(f"{what}: the type {command.command_type!r} has characters that cannot be stored")
    return NewCommand(
        command.command_type,
        command_id,
        command.data,
        _queue(command.reply_to, using),
        None if command.correlation_id is None else uuid_of(command.correlation_id, f"correlation_id of {what}"),
        _seconds(command.delay),
    )


def _is_usual(command: NewCommand) -> bool:
    """Whether it is what most commands are, of which nothing is left to verify but the id."""
    kind = command.command_type
    if command.reply_to is not None or command.correlation_id is not None or command.delay is not None:
        return False
    return type(kind) is str and 1 <= len(kind) <= 255 and kind.isascii() and kind.isprintable()


def database_for_sending(domain: str, *, outside_transaction: bool = False) -> str:
    """The database of a domain. Raises TransactionMismatchError if only others have a transaction open."""
    using = database_of(domain)
    if domain.endswith(conf.REPLIES) or domain == conf.current().reply_queue:
        raise InvalidCommandError(f"{domain!r} is a reply queue; send to the domain whose commands are answered there")
    if outside_transaction or not conf.current().has_several_databases or is_in_transaction(connections[using]):
        return using
    for other in connections.all(initialized_only=True):
        if other.alias != using and is_in_transaction(other):
            raise TransactionMismatchError(domain, using, other.alias)
    return using


def database_of(domain: str) -> str:
    """The database of a domain that is known there. A miss asks the database, for other processes register too."""
    if not isinstance(domain, str):
        raise UnknownDomainError(f"domain must be a name, not {domain!r:.100}")
    using = conf.current().database_of(domain)
    if domain not in _known_domains.get(using, ()):
        _known_domains[using] = set(Domain.objects.using(using).values_list("name", flat=True))
    known = _known_domains[using]
    if domain not in known:
        raise UnknownDomainError(
            f"domain {domain!r} is not registered; known: {', '.join(sorted(known)) or 'none'}; add it to "
            f"COMMANDBUS['DOMAINS'] or write a handler for it, then run: manage.py commandbus_setup"
        )
    return using


def is_in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Whether what is written now waits for a commit of the caller's. Opens no connection."""
    if connection.atomic_blocks:
        # Those that Django's TestCase opens around each test do not count: there are none in production.
        return not all(getattr(block, "_from_testcase", False) for block in connection.atomic_blocks)
    if connection.connection is None:
        return not connection.settings_dict["AUTOCOMMIT"]
    return not connection.autocommit


def _queue(reply_to: object, using: str) -> str | None:
    if reply_to is None:
        return None
    queue = str(reply_to).replace(".", "__")
    if queue not in _known_queues.get(using, ()):
        _known_queues[using] = set(PgmqClient(using).list_queues())
    if queue not in _known_queues[using] or queue.endswith(conf.OTHER_QUEUES):
        raise UnknownQueueError(
            f"there is no reply queue {reply_to!r} in database {using!r}; "
            f"a domain that is registered there has '<domain>__replies'"
        )
    return queue


def uuid_of(value: object, what: str) -> UUID:
    if isinstance(value, UUID):
        return value
    try:
        if isinstance(value, str):
            return UUID(value)
    except ValueError:
        pass
    raise InvalidCommandError(f"{what} must be a UUID, not {value!r:.100}; make one with commandbus.uuid7()")


def _seconds(delay: object) -> float | None:
    if delay is None:
        return None
    if isinstance(delay, timedelta):
        delay = delay.total_seconds()
    if isinstance(delay, bool) or not isinstance(delay, int | float) or not math.isfinite(delay):
        raise InvalidCommandError(f"delay must be seconds or a timedelta, not {delay!r:.100}")
    if not 0 <= delay <= LONGEST_DELAY:
        raise InvalidCommandError(f"delay must be from 0 seconds to 100 years, not {delay!r}")
    return float(delay)
