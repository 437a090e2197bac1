"""Every setting of COMMANDBUS with its default and its meaning.

COMMANDBUS = {"DOMAINS": ["payments"], "MARK_IN_PROGRESS": False}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from keyword import iskeyword
from typing import Any, Literal

from django.conf import settings
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from commandbus.exceptions import ConfigurationError
from commandbus.policies import VERDICTS, ExceptionMapping, RetryPolicy, is_between

DEFAULT_ALIAS = "default"
LONGEST_QUEUE = 47
LONGEST_DOMAIN = LONGEST_QUEUE - len("__events_dlq")
NAME = re.compile(r"[a-z][a-z0-9_-]*")
REPLIES = "__replies"
OTHER_QUEUES = ("__commands", "__events", "__events_dlq")

NotifyMode = Literal["after_commit", "in_transaction", "off"]


@dataclass(frozen=True, kw_only=True)
class Config:
    domains: tuple[str, ...] = ()
    """DOMAINS: domains to register beside those that have handlers."""

    databases: Mapping[str, str] = field(default_factory=dict)
    """DATABASES: the database alias of a domain; others live on "default"."""

    unique_scope: Literal["domain", "global"] = "domain"
    """UNIQUE_SCOPE: a command id is unique in its domain, or over all domains of its database."""

    mark_in_progress: bool = True
    """MARK_IN_PROGRESS: show a leased command as IN_PROGRESS, or as PENDING until it ends."""

    reset_attempts_on_operator_retry: bool = True
    """RESET_ATTEMPTS_ON_OPERATOR_RETRY: an operator's retry starts with all attempts again, or adds one."""

    payload_archive: bool = False
    """PAYLOAD_ARCHIVE: keep every payload in command_bus_payload_archive, independent of PGMQ's archives."""

    reply_queue: str | None = None
    """REPLY_QUEUE: one reply queue for all domains; None: each domain has its own, <domain>__replies."""

    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    """RETRY_POLICY: for handlers that name none: {"max_attempts": 3, "backoff": (10, 60, 300), "jitter": 0.0}."""

    exceptions: ExceptionMapping = field(default_factory=dict)
    """EXCEPTIONS: dotted name of an exception → "transient", "permanent", "business" or "cancel"."""

    max_payload_bytes: int = 1024 * 1024
    """MAX_PAYLOAD_BYTES: the most that a command's data may take as JSON."""

    crash_limit: int = 2
    """CRASH_LIMIT: how often a command may kill a process that runs nothing else, until an operator gets it."""

    unknown_type_grace: float = 300.0
    """UNKNOWN_TYPE_GRACE: seconds that a command waits for a worker with its handler, until an operator gets it."""

    handlers_module: str = "handlers"
    """HANDLERS_MODULE: the module of each app in which handlers are looked for."""

    notify: NotifyMode = "after_commit"
    """NOTIFY: wake an idle worker after the commit of a send, within its transaction, or leave it to polling."""

    mask: tuple[str, ...] = ("password", "passwd", "secret", "token", "api_key", "authorization")
    """MASK: keys of JSON objects, at any depth, whose values the admin never shows. Case does not matter."""

    listen_databases: Mapping[str, str] = field(default_factory=dict)
    """LISTEN_DATABASES: alias → alias of a direct connection for LISTEN, where the first goes through PgBouncer."""

    @property
    def has_several_databases(self) -> bool:
        """Whether domains may live on more than one: a domain that is not in DATABASES lives on "default"."""
        return any(alias != DEFAULT_ALIAS for alias in self.databases.values())

    def database_of(self, domain: str) -> str:
        """Of a domain, or of the reply queue of one."""
        return self.databases.get(domain) or self.databases.get(domain.removesuffix(REPLIES), DEFAULT_ALIAS)

    def reply_queue_of(self, domain: str) -> str:
        return self.reply_queue or f"{domain}{REPLIES}"

    def listen_database_of(self, alias: str) -> str:
        return self.listen_databases.get(alias, alias)


def current() -> Config:
    """The settings as they are now. Raises ConfigurationError with everything that is wrong with them."""
    config, problems = _parsed()
    if problems:
        raise ConfigurationError("; ".join(problems))
    return config


def problems() -> list[str]:
    return list(_parsed()[1])


def check_domain_name(name: object) -> None:
    """Raise ConfigurationError unless PGMQ can hold the four queues of a domain with this name."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigurationError(
            f"domain name {name!r} is not valid: use a lower-case letter, then lower-case letters, digits, '_' or '-' "
            f"(PGMQ lower-cases queue names, so other names could collide)"
        )
    if name.endswith((REPLIES, *OTHER_QUEUES)):
        raise ConfigurationError(f"domain name {name!r} is not valid: it is the name of a queue; choose another ending")
    if len(name) > LONGEST_DOMAIN:
        raise ConfigurationError(
            f"domain name {name!r} has {len(name)} characters; at most {LONGEST_DOMAIN} fit, "
            f"because PGMQ allows {LONGEST_QUEUE} for '{name}__events_dlq'"
        )


def check_reply_queue(name: object) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > LONGEST_QUEUE:
        raise ConfigurationError(
            f"reply queue {name!r} is not valid: use at most {LONGEST_QUEUE} of a-z, 0-9, '_' and '-', a letter first"
        )
    if name.endswith(OTHER_QUEUES):
        raise ConfigurationError(f"reply queue {name!r} collides with a queue that a domain uses for something else")


@cache
def _parsed() -> tuple[Config, tuple[str, ...]]:
    given = getattr(settings, "COMMANDBUS", {})
    if not isinstance(given, Mapping):
        return Config(), (f"COMMANDBUS must be a dict, not {type(given).__name__}",)
    known = {f.name.upper(): f.name for f in fields(Config)}
    values: dict[str, Any] = {}
    wrong: list[str] = []
    for key, value in given.items():
        if key not in known:
            wrong.append(f"COMMANDBUS[{key!r}] is not a setting; there are {', '.join(sorted(known))}")
            continue
        try:
            values[known[key]] = _READERS[key](value)
        except (ConfigurationError, TypeError, ValueError, ImportError, AttributeError) as error:
            wrong.append(f"COMMANDBUS[{key!r}] is {value!r}: {error}")
    return Config(**values), tuple(wrong)


def _clear(*, setting: str, **_: object) -> None:
    if setting == "COMMANDBUS":
        _parsed.cache_clear()


setting_changed.connect(_clear)


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError("it must be True or False")
    return value


def _choice(*choices: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        if value not in choices:
            raise ConfigurationError(f"it must be one of {', '.join(choices)}")
        return str(value)

    return read


def _domains(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple | set | frozenset):
        raise ConfigurationError("it must be a list of domain names")
    for name in value:
        check_domain_name(name)
    return tuple(value)


def _aliases(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(v, str) for pair in value.items() for v in pair):
        raise ConfigurationError("it must be a dict of names")
    for alias in value.values():
        if alias not in settings.DATABASES:
            raise ConfigurationError(f"{alias!r} is not in DATABASES, which has {', '.join(settings.DATABASES)}")
    return dict(value)


def _databases(value: object) -> dict[str, str]:
    aliases = _aliases(value)
    for name in aliases:
        if name != getattr(settings, "COMMANDBUS", {}).get("REPLY_QUEUE"):
            check_domain_name(name)
    return aliases


def _listen_databases(value: object) -> dict[str, str]:
    aliases = _aliases(value)
    for alias in aliases:
        if alias not in settings.DATABASES:
            raise ConfigurationError(f"{alias!r} is not in DATABASES, which has {', '.join(settings.DATABASES)}")
    return aliases


def _keys(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple | set | frozenset):
        raise ConfigurationError("it must be a list of names")
    for name in value:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"{name!r} is not the name of a key")
    return tuple(value)


def _reply_queue(value: object) -> str | None:
    if value is not None:
        check_reply_queue(value)
    return value if isinstance(value, str) else None


def _retry_policy(value: object) -> RetryPolicy:
    if isinstance(value, RetryPolicy):
        return value
    if not isinstance(value, Mapping):
        raise ConfigurationError("it must be a RetryPolicy or a dict with its fields")
    return RetryPolicy(**value)


def _exceptions(value: object) -> ExceptionMapping:
    if not isinstance(value, Mapping):
        raise ConfigurationError("it must be a dict of exception names and verdicts")
    mapping = {}
    for name, verdict in value.items():
        cls = import_string(name) if isinstance(name, str) else name
        if not (isinstance(cls, type) and issubclass(cls, BaseException)):
            raise ConfigurationError(f"{name!r} is not an exception class")
        if verdict not in VERDICTS:
            raise ConfigurationError(f"the verdict {verdict!r} of {name!r} is not one of {', '.join(VERDICTS)}")
        mapping[cls] = verdict
    return mapping


def _max_payload_bytes(value: object) -> int:
    if not isinstance(value, int) or not is_between(value, 1, 200 * 1024 * 1024):
        raise ConfigurationError("it must be a number of bytes from 1 to 209715200")
    return value


def _crash_limit(value: object) -> int:
    if not isinstance(value, int) or not is_between(value, 1, 1000):
        raise ConfigurationError("it must be a number from 1 to 1000")
    return value


def _grace(value: object) -> float:
    if not isinstance(value, int | float) or not is_between(value, 0, 365 * 24 * 3600):
        raise ConfigurationError("it must be a number of seconds from 0 to a year")
    return float(value)


def _module_name(value: object) -> str:
    if not isinstance(value, str) or not all(part.isidentifier() and not iskeyword(part) for part in value.split(".")):
        raise ConfigurationError("it must be the name of a module")
    return value


_READERS: dict[str, Callable[[object], object]] = {
    "DOMAINS": _domains,
    "DATABASES": _databases,
    "UNIQUE_SCOPE": _choice("domain", "global"),
    "MARK_IN_PROGRESS": _boolean,
    "RESET_ATTEMPTS_ON_OPERATOR_RETRY": _boolean,
    "PAYLOAD_ARCHIVE": _boolean,
    "REPLY_QUEUE": _reply_queue,
    "RETRY_POLICY": _retry_policy,
    "EXCEPTIONS": _exceptions,
    "MAX_PAYLOAD_BYTES": _max_payload_bytes,
    "CRASH_LIMIT": _crash_limit,
    "UNKNOWN_TYPE_GRACE": _grace,
    "HANDLERS_MODULE": _module_name,
    "NOTIFY": _choice("after_commit", "in_transaction", "off"),
    "MASK": _keys,
    "LISTEN_DATABASES": _listen_databases,
}
