"""An epilogue that differs from another in one swap. No cache may take one for the other."""

from __future__ import annotations

import random
import re
from dataclasses import replace

from fuzzing.case import Case
from fuzzing.writer import Statement

_ORDERED = re.compile(r"\((\w+) (-|<|<=|>|>=) (\w+)\)")


def sibling(case: Case) -> Case | None:
    """The case with the two sides of one operator swapped, or with two operands of the same type swapped.

    None if neither is possible.
    """
    rng = random.Random(case.seed)
    ways = [_other_sides, _other_operands]
    rng.shuffle(ways)
    return next((made for way in ways if (made := way(case, rng)) is not None), None)


def _other_sides(case: Case, rng: random.Random) -> Case | None:
    places = [i for i, statement in enumerate(case.statements) if _ORDERED.search(statement.text)]
    if not places:
        return None
    at = rng.choice(places)
    swapped = list(case.statements)
    swapped[at] = replace(swapped[at], text=_ORDERED.sub(r"(\3 \2 \1)", swapped[at].text, count=1))
    return replace(case, statements=swapped)


def _other_operands(case: Case, rng: random.Random) -> Case | None:
    groups: dict[object, list[str]] = {}
    for operand in case.operands:
        if operand.dims:
            groups.setdefault(operand._replace(name=""), []).append(operand.name)
    pairs = [names for names in groups.values() if len(names) > 1]
    if not pairs:
        return None
    first, second = rng.sample(rng.choice(pairs), 2)
    other = {first: second, second: first}

    def renamed(text: str) -> str:
        return re.sub(rf"\b({first}|{second})\b", lambda match: other[match[1]], text)

    return replace(case, statements=[Statement(s.name, renamed(s.text), s.value) for s in case.statements])
