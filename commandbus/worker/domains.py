"""What a worker serves, and what that needs."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import connections

from commandbus import conf, install
from commandbus.exceptions import ConfigurationError
from commandbus.handlers import HandlerRegistry, registry
from commandbus.models import Domain

CONNECTIONS_BESIDE_EXECUTORS = 4  # fetcher, finisher, keeper, folder


def databases_of(domains: tuple[str, ...]) -> dict[str, str]:
    config = conf.current()
    return {domain: config.database_of(domain) for domain in dict.fromkeys(domains)}


def reply_queues_of(domains: Sequence[str], handlers: HandlerRegistry = registry) -> tuple[str, ...]:
    """The reply queues of domains, which a worker serves like domains. Raises ConfigurationError without a handler."""
    config = conf.current()
    for domain in domains:
        if domain not in handlers.reply_domains():
            known = ", ".join(sorted(handlers.reply_domains())) or "none"
            raise ConfigurationError(
                f"nobody handles the replies of domain {domain!r}; domains with a reply handler: {known}; "
                f"write one with @reply_handler({domain!r})"
            )
        queue = config.reply_queue_of(domain)
        if config.database_of(queue) != config.database_of(domain):
            raise ConfigurationError(
                f"the replies of domain {domain!r} arrive in queue {queue!r} of another database than its handlers "
                f"serve: a shared reply queue can have handlers in one database only; if it shall be this one, set "
                f"COMMANDBUS['DATABASES'][{queue!r}] = {config.database_of(domain)!r}"
            )
    return tuple(dict.fromkeys(config.reply_queue_of(domain) for domain in domains))


def require_domains(using: str, domains: list[str]) -> None:
    """Register what the settings and the handlers name, and raise ConfigurationError for a domain that nobody named."""
    install.register_domains(using)
    known = set(Domain.objects.using(using).values_list("name", flat=True))
    for domain in domains:
        if domain not in known:
            raise ConfigurationError(
                f"domain {domain!r} is not registered; known: {', '.join(sorted(known)) or 'none'}; "
                f"add it to COMMANDBUS['DOMAINS'] or write a handler for it"
            )


def require_pool(using: str, concurrency: int) -> None:
    pool = connections[using].settings_dict.get("OPTIONS", {}).get("pool")
    if not pool:
        return
    options = pool if isinstance(pool, dict) else {}
    size = options.get("max_size") or options.get("min_size", 4)
    needed = concurrency + CONNECTIONS_BESIDE_EXECUTORS
    if size < needed:
        raise ConfigurationError(
            f"the connection pool of database {using!r} holds {size} connections, and this worker needs {needed}; "
            f"raise OPTIONS['pool']['max_size'] or lower --concurrency"
        )
