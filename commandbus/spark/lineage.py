"""What the columns of a DataFrame follow from, as far as Spark's plans tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame

TIMES = {"current_timestamp", "now", "current_date", "localtimestamp", "current_time"}
SUBQUERIES = {"ScalarSubquery", "Exists", "ListQuery", "LateralSubquery"}


def unstable_functions(df: DataFrame) -> list[str]:
    """Names of functions that columns follow from and that answer something else another time."""
    session: Any = df.sparkSession._jsparkSession
    analyzed = df._jdf.queryExecution().analyzed()
    # Optimised, what nobody asks for is gone: a random delay is nobody's harm. And anew, for the plan that is optimised
    # already has what is cached, which another session does not have.
    names = _random(session.sessionState().optimizer().execute(analyzed))
    java: Any = df.sparkSession._jvm
    time = java.org.apache.spark.sql.catalyst.trees.TreePattern.CURRENT_LIKE()
    if analyzed.containsPattern(time):  # seldom, and to follow the columns takes a second
        names += _times(analyzed)
    return names


def _random(plan: Any) -> list[str]:
    if plan.deterministic():
        return []
    parts = [part for node in _tree(plan) for expression in _items(node.expressions()) for part in _tree(expression)]
    return [part.prettyName() for part in parts if not part.deterministic()][-1:]  # the outer ones come first


def _times(plan: Any) -> list[str]:
    """Functions of the time that the columns of a plan follow from. (A filter by date is nobody's harm.)"""
    sources = _sources(plan)
    wanted = list(_items(plan.output()))
    seen: set[int] = set()
    names: list[str] = []
    while wanted:
        for part in _tree(wanted.pop()):
            kind = _class(part)
            if kind == "AttributeReference":
                number = _number(part)
                if number not in seen:
                    seen.add(number)
                    wanted += sources[number]
            elif kind in SUBQUERIES:  # also its filters say what it answers
                wanted += [expression for node in _nodes(part.plan()) for expression in _items(node.expressions())]
            elif part.prettyName() in TIMES:
                names.append(part.prettyName())
    return names


def _sources(plan: Any) -> dict[int, list[Any]]:
    """Of each column of a plan, by its number: the expressions that it is made of."""
    found: defaultdict[int, list[Any]] = defaultdict(list)
    tables: dict[int, Any] = {}
    references: list[Any] = []
    for node in _nodes(plan):
        kind = _class(node)
        for expression in _items(node.expressions()):
            for part in _tree(expression):
                if _class(part) == "Alias":
                    found[_number(part)].append(part.child())
        if kind == "Union":
            for child in _items(node.children()):
                _made_of(found, node.output(), child.output())
        elif kind == "Expand":
            for projection in _items(node.projections()):
                _made_of(found, node.output(), projection)
        elif kind == "Generate":
            for column in _items(node.generatorOutput()):
                found[_number(column)].append(node.generator())
        elif kind == "CTERelationDef":
            tables[node.id()] = node
        elif kind == "CTERelationRef":
            references.append(node)
    for reference in references:
        if reference.cteId() in tables:
            _made_of(found, reference.output(), tables[reference.cteId()].output())
    return found


def _made_of(found: dict[int, list[Any]], columns: Any, expressions: Any) -> None:
    for column, expression in zip(_items(columns), _items(expressions), strict=True):
        found[_number(column)].append(expression)


def _nodes(plan: Any) -> Iterator[Any]:
    """Of a plan, and of those in its expressions."""
    for node in _tree(plan):
        yield node
        for expression in _items(node.expressions()):
            for part in _tree(expression):
                if _class(part) in SUBQUERIES:
                    yield from _nodes(part.plan())


def _number(column: Any) -> int:
    return int(column.exprId().id())


def _class(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _tree(node: Any) -> Iterator[Any]:
    yield node
    for child in _items(node.children()):
        yield from _tree(child)


def _items(sequence: Any) -> Iterator[Any]:
    """Of a sequence of Scala's."""
    for number in range(sequence.size()):
        yield sequence.apply(number)
