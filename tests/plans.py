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

AS_IT_IS, EMPTY, EMPTIED = "as it is", "empty", "emptied"
BELIEFS = (AS_IT_IS, EMPTY, EMPTIED)


@contextmanager
def believing(belief: str, fill: Callable[[], object], tables: Sequence[str]) -> Iterator[None]:
    """That tables are EMPTY, as after an ANALYZE of what was pruned: then PostgreSQL counts on no rows at all, however
    many pages there are. Where they are EMPTIED, it still knows how the values were spread. Or what tests before have
    left, AS_IT_IS.
    """
    try:
        if belief != AS_IT_IS:
            fill()
            if belief == EMPTIED:
                _execute("ANALYZE {}", tables)
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
    """How many rows of each table are read meanwhile, and how often each index is."""
    read: Counter[str] = Counter()
    before = _read(tables)
    yield read
    read.update(_read(tables))
    read.subtract(before)


def _read(tables: Sequence[str]) -> Counter[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT indexrelname, pg_stat_get_xact_numscans(indexrelid) FROM pg_stat_user_indexes")
        return Counter({**dict(cursor.fetchall()), **{table: rows_read(table) for table in tables}})


def _execute(statement: str, tables: Sequence[str]) -> None:
    with connection.cursor() as cursor:
        for table in tables:
            cursor.execute(statement.format(table))
