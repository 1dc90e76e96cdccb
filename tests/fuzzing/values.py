"""What the generator knows about a value that it has written: its kind, its dims, and how exact it is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

Kind = Literal["mask", "int", "long", "float"]
RANK: dict[str, int] = {"mask": 0, "int": 1, "long": 2, "float": 3}

Dims = tuple[str, ...]
"""One letter for each dim: l, m or n; g and s for the two pieces of m; h and d for those of n; or 1."""


class Facts(NamedTuple):
    """Every element is a multiple of `step`, and its absolute value is at most `bound`.

    `rounded` values may be inexact. Only operations that give equal bits for equal bits may take them with exact data.
    """

    bound: float
    step: float = 1.0
    rounded: bool = False


class Val(NamedTuple):
    """A value of the epilogue: a name or an expression, its `text`.

    A `host` value is a number outside the kernel. `literal` is its value if it is written as a literal. `narrow` is the
    16-bit dtype of a float that was cast to it. A `raw` operand was not combined with another value yet, so that only
    its shape says which axes it has.
    """

    text: str
    kind: Kind
    dims: Dims
    facts: Facts
    host: bool = False
    narrow: str | None = None
    literal: float | int | None = None
    raw: bool = False


def broadcast(all_dims: Sequence[Dims]) -> Dims | None:
    """The broadcast of dims by NumPy's rule; None if two different axes would meet."""
    result = []
    for column in zip_longest(*(reversed(dims) for dims in all_dims), fillvalue="1"):
        letters = {letter for letter in column if letter != "1"}
        if len(letters) > 1:
            return None
        result.append(letters.pop() if letters else "1")
    # No value of an epilogue has the same axis twice.
    named = [letter for letter in result if letter != "1"]
    return tuple(reversed(result)) if len(set(named)) == len(named) else None


def promote(kinds: Sequence[Kind]) -> Kind:
    """The highest of the kinds."""
    return max(kinds, key=RANK.__getitem__)


def exact_limit(kind: Kind) -> float:
    """The largest `bound / step` with which arithmetic on a value is exact."""
    return 2.0**23 if kind == "float" else 2.0**30 if kind == "int" else 2.0**52
