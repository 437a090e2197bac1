"""Connections to PostgreSQL from Spark's processes, none of which ever repeats a password.

An error is raised without the one that it comes from: libpq repeats a malformed URL, and Spark writes what an executor
raises into its logs and onto its pages.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Self, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict

from commandbus.exceptions import (
    BatchRefusedError,
    CommandBusError,
    ConfigurationError,
    InvalidCommandError,
    SparkJobRefusedError,
    UnknownBatchError,
    UnknownDomainError,
    UnknownQueueError,
    UnreachableError,
    UnsupportedIsolationLevelError,
)

DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
"""So that a machine that vanishes without a word is noticed."""
PAUSES = (0.1, 0.5, 1.0, 2.0)
"""Between two attempts to reach PostgreSQL; the last one repeats."""
FUNCTION_IS_MISSING = {"3F000", "42883", "42P01"}
AGAIN = {"25006", "40001", "40P01", "53300", "55P03", "57P01", "57P02", "57P03", "57P05", "CB007"}
"""What passes: a server that was a standby a moment ago, serialization, deadlocks, too many connections, locks, a
server that stops or starts, a connection that was ended because it was idle, and one who has just sent the same."""

REMEDIES = {
    "25006": "this server only reads: name the primary, or all servers and target_session_attrs=read-write",
    "57014": "if that was the statement_timeout of this user or database: allow more, for example by "
    "options=-c%20statement_timeout=60s in the url, or send fewer rows in a transaction (chunkRows)",
}

_OWN: dict[str, type[CommandBusError]] = {
    "CB001": UnknownDomainError,
    "CB002": InvalidCommandError,
    "CB003": UnsupportedIsolationLevelError,
    "CB004": UnknownQueueError,
    "CB005": UnknownBatchError,
    "CB006": BatchRefusedError,
    "CB008": SparkJobRefusedError,
}

Parameters = Mapping[str, str]
T = TypeVar("T")


def parameters_of(url: str) -> dict[str, str]:
    """The connection parameters that a URL, or text like "host=… dbname=…", stands for. Opens no connection."""
    if not url.strip():
        raise ConfigurationError("the url is empty; write postgresql://user@host:5432/database")
    if url.startswith("jdbc:"):
        raise ConfigurationError(
            "the url begins with jdbc:, which is not needed; write postgresql://user@host/database"
        )
    try:
        found = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    except psycopg.Error:
        found = None
    if found is None or not _is_place(found):
        raise ConfigurationError(
            "the url cannot be read (it is not repeated here, for it may hold a password); "
            "write postgresql://user@host:5432/database, with %40 for an @ and %2F for a / in a name or a password"
        )
    return found


def _is_place(parameters: Parameters) -> bool:
    """Not so, where a part of a password stands elsewhere, and would be repeated when nothing is found there.

    It does, where it has an @ or a / that is not escaped, or where parameters are separated by semicolons.
    """
    hosts = [host[1:] for host in parameters.get("host", "").split(",")]  # one in the file system may begin with @
    is_port = re.fullmatch(r"[\d,]*", parameters.get("port", "")) is not None
    names = (*hosts, parameters.get("dbname", ""))
    has_more = any(re.search("[;=]", name) for name in (*names, parameters.get("user", "")))
    others = [value for name, value in parameters.items() if name != "password"]
    return is_port and not has_more and not any("@" in name for name in names) and not any(";" in one for one in others)


def resolved(url: str, patience: float = 0) -> dict[str, str]:
    """As parameters_of, with all that this machine adds: environment, service and password files.

    So an executor needs none of these. Connects, for which it tries for up to `patience` seconds; raises an
    UnreachableError if that is not possible.
    """
    parameters = parameters_of(url)
    connection = _repeated(lambda: connected(parameters), patience)
    try:
        info = connection.info
        # Also what is as usual: the environment of an executor may say otherwise.
        usual = {
            "host": info.host,
            "port": str(info.port),
            "dbname": info.dbname,
            "user": info.user,
            "sslmode": "prefer",
        }
        found = {name: value for name, value in info.get_parameters().items() if name in _USEFUL}
        password = {"password": info.password} if info.password else {}
        return {**{name: value for name, value in usual.items() if value}, **found, **password}
    finally:
        connection.close()


_USEFUL = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()} - {
    "application_name",
    "client_encoding",
    "passfile",
    "replication",
    "service",
}


class Session:
    """A connection that is opened when it is needed, and again when it was lost.

    `call` repeats what a lost connection, a restart or a deadlock has stopped, for up to `patience` seconds. So it is
    for statements only that may be repeated, also if they were committed.
    """

    def __init__(self, parameters: Parameters, *, patience: float, name: str = "") -> None:
        self._parameters = {**parameters, "application_name": f"commandbus spark {name}"[:63].strip()}
        self._patience = patience
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()

    def call(self, query: str, arguments: Sequence[Any], *, however_long: bool = False) -> list[tuple[Any, ...]]:
        """`however_long`: the statement may take longer than the database usually allows."""
        return _repeated(lambda: self._execute(query, arguments, however_long), self._patience, self.close)

    def _execute(self, query: str, arguments: Sequence[Any], however_long: bool) -> list[tuple[Any, ...]]:
        if self._connection is None:
            self._connection = connected(self._parameters)
        with self._connection.transaction() if however_long else nullcontext():
            cursor = self._connection.cursor(binary=True)
            if however_long:
                cursor.execute("SET LOCAL statement_timeout = 0")
                # If we vanish without a word, nobody waits for our locks until PostgreSQL's machine has noticed.
                cursor.execute("SET LOCAL idle_in_transaction_session_timeout = '60s'")
                if self._connection.info.server_version >= 170000:
                    cursor.execute("SET LOCAL transaction_timeout = 0")
            return cursor.execute(query.encode(), arguments).fetchall()


def _repeated(action: Callable[[], T], patience: float, before_again: Callable[[], None] = lambda: None) -> T:
    """What `action` answers, tried for up to `patience` seconds from its first failure that may pass."""
    gives_up_at: float | None = None
    number = 0
    while True:
        try:
            return action()
        except (psycopg.Error, UnreachableError) as error:
            failure = error
        if not _may_pass(failure):
            break
        before_again()
        now = time.monotonic()
        gives_up_at = now + patience if gives_up_at is None else gives_up_at
        pause = PAUSES[min(number, len(PAUSES) - 1)]
        if now + pause > gives_up_at:
            break
        time.sleep(pause)
        number += 1
    raise (failure if isinstance(failure, UnreachableError) else own_error(failure)) from None


def own_error(error: psycopg.Error) -> CommandBusError:
    """What a statement has failed with, as ours, and without what the statement held."""
    message = str(error.diag.message_primary or error).strip()
    hint = f". {error.diag.message_hint}" if error.diag.message_hint else ""
    if error.sqlstate in _OWN:
        return _OWN[error.sqlstate](message + hint)
    if error.sqlstate in REMEDIES:
        return CommandBusError(f"PostgreSQL has refused: {message}; {REMEDIES[error.sqlstate]}")
    if error.sqlstate in FUNCTION_IS_MISSING:
        return ConfigurationError(
            f"the database has no commandbus, or an older one ({message}); run manage.py migrate there"
        )
    return CommandBusError(f"PostgreSQL has refused: {message}{hint} (SQLSTATE {error.sqlstate})")


def _may_pass(error: psycopg.Error | UnreachableError) -> bool:
    """Whether the same may succeed a moment later: PostgreSQL may just be restarting."""
    if isinstance(error, UnreachableError):
        return True
    if error.sqlstate is None:  # the connection is lost
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return error.sqlstate in AGAIN or error.sqlstate.startswith("08")


def connected(parameters: Parameters) -> psycopg.Connection[tuple[Any, ...]]:
    try:
        return psycopg.connect(
            **{**DEFAULTS, **parameters},  # type: ignore[arg-type]
            autocommit=True,
            prepare_threshold=None,  # PgBouncer
        )
    except psycopg.Error as error:
        reason = " ".join(str(error).split())
        if parameters.get("password"):
            reason = reason.replace(parameters["password"], "***")
        raise UnreachableError(f"PostgreSQL cannot be reached: {reason}; is the url right, and does it run?") from None
