"""Cut a failing case down: first to fewer outputs, then to fewer statements, while it still fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from fuzzing.case import Case
from fuzzing.check import run
from fuzzing.writer import Statement


def smallest(case: Case) -> Case:
    """The smallest case found that still fails with the same class of exception."""
    case = _without_dead(case)
    way = _failure(case)
    shrunk = True
    while shrunk:
        shrunk = False
        for smaller in _smaller(case):
            if way is not None and _failure(smaller) is way:
                case, shrunk = smaller, True
                break
    return case


def _failure(case: Case) -> type[Exception] | None:
    """The class of the exception with which a case fails, or None. Every exception counts as a failure of the case."""
    try:
        run(case)
    except Exception as error:
        return type(error)
    return None


def _smaller(case: Case) -> Iterator[Case]:
    if len(case.outputs) > 1:
        for output in case.outputs:
            yield _without_dead(replace(case, outputs=[output]))
    if case.tile != (1 << 20, 1 << 20):
        yield replace(case, tile=(1 << 20, 1 << 20))
    results = {output.name for output in case.outputs}
    for position, statement in enumerate(case.statements):
        if statement.name in results:
            continue
        for other in case.statements[:position]:
            if _alike(statement, other):
                yield _without_dead(_with_alias(case, statement, other))


def _alike(statement: Statement, other: Statement) -> bool:
    x, y = statement.value, other.value
    return x is not None and y is not None and (x.kind, x.dims, x.narrow) == (y.kind, y.dims, y.narrow)


def _with_alias(case: Case, statement: Statement, other: Statement) -> Case:
    """The case without `statement`: every later use of it reads `other` instead."""
    pattern = re.compile(rf"\b{statement.name}\b")
    kept = [
        Statement(s.name, pattern.sub(other.name, s.text), s.value) for s in case.statements if s.name != statement.name
    ]
    return replace(case, statements=kept)


def _without_dead(case: Case) -> Case:
    wanted = {output.name for output in case.outputs}
    kept = []
    for statement in reversed(case.statements):
        if statement.name in wanted:
            kept.append(statement)
            wanted |= set(re.findall(r"\b\w+\b", statement.text))
    return replace(case, statements=kept[::-1])
