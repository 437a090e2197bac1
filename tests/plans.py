"""What PostgreSQL believes of tables, and what it reads of them.

Statistics outlive the transaction of a test. So whoever has lied about tables tells the truth at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from django.db import connection
from psycopg.pq import TransactionStatus

from tests.helpers import rows_read

AS_IT_IS, EMPTY = "as it is", "empty"
BELIEFS = (AS_IT_IS, EMPTY)


@contextmanager
def believing(belief: str, fill: Callable[[], object], tables: Sequence[str]) -> Iterator[None]:
    """That tables are EMPTY, as after an ANALYZE of what was pruned: then PostgreSQL counts on no rows at all, however
    many pages there are. Or what tests before have left, AS_IT_IS.
    """
    try:
        if belief == EMPTY:
            fill()
            _execute("DELETE FROM {}", tables)
            _execute("ANALYZE {}", tables)
            with connection.cursor() as cursor:
                names = [table.rpartition(".")[2] for table in tables]
                cursor.execute("SELECT relname FROM pg_class WHERE reltuples = 0 AND relpages > 0")
                assert set(names) <= {name for (name,) in cursor}
        yield
    finally:
        if connection.connection.info.transaction_status != TransactionStatus.INERROR:
            _execute("ANALYZE {}", tables)


@contextmanager
def reading(tables: Sequence[str]) -> Iterator[Counter[str]]:
    """How many rows of each table are read meanwhile."""
    read: Counter[str] = Counter()
    before = {table: rows_read(table) for table in tables}
    yield read
    read.update({table: rows_read(table) - before[table] for table in tables})


def _execute(statement: str, tables: Sequence[str]) -> None:
    with connection.cursor() as cursor:
        for table in tables:
            cursor.execute(statement.format(table))
