from __future__ import annotations

from datetime import timedelta

from django.db.models import F
from django.test.testcases import DatabaseOperationForbidden  # type: ignore[attr-defined] # the stubs lack it

from commandbus import conf, install
from commandbus.models import Command, Domain, Node
from commandbus.pgmq.client import PgmqClient


def advance(domain: str, seconds: float) -> None:
    """Move the clock of a domain: delays, backoffs and leases end that much earlier."""
    using = conf.current().database_of(domain)
    by = timedelta(seconds=seconds)
    queue = Domain.objects.using(using).values_list("queue_name", flat=True).get(name=domain)
    PgmqClient(using).shift_visibility(queue, by)
    leased = Command.objects.using(using).filter(domain=domain, lease_expires_at__isnull=False)
    leased.update(lease_expires_at=F("lease_expires_at") - by)
    # Who lives was heard of all the time.
    Node.objects.using(using).update(heard_since=F("heard_since") - by, started_at=F("started_at") - by)


def purge() -> None:
    """Empty all queues of all databases that domains live on, as far as this test may use them."""
    for using in install.databases():
        client = PgmqClient(using)
        try:
            queues = client.list_queues()
        except DatabaseOperationForbidden:  # so nothing was sent there
            continue
        for queue in queues:
            client.purge(queue)
