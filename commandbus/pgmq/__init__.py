"""Our Django face of PGMQ. Besides `commandbus/sql`, nothing else names a function or table of PGMQ."""

from commandbus.pgmq.client import Message, PgmqClient, QueueMetrics

__all__ = ["Message", "PgmqClient", "QueueMetrics"]
