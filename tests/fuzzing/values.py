"""What the generator knows about a value it has written: its kind, its dims, and how exact it is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

Kind = Literal["mask", "int", "long", "float"]
RANK: dict[str, int] = {"mask": 0, "int": 1, "long": 2, "float": 3}

Dims = tuple[str, ...]
"""One letter a dim: l m n, their pieces g s (of m) and h d (of n), or 1."""


class Facts(NamedTuple):
    """Every element is a multiple of `step`, at most `bound`; `rounded` if only equal bits in make equal bits out."""

    bound: float
    step: float = 1.0
    rounded: bool = False


class Val(NamedTuple):
    """A name or an expression of the epilogue. `host` numbers live outside the kernel; `literal` is written out.

    A `raw` operand has not met another value yet, so that only its shape says which axes it has.
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
    """NumPy's rule on letters; None where two different axes would meet."""
    result = []
    for column in zip_longest(*(reversed(dims) for dims in all_dims), fillvalue="1"):
        letters = {letter for letter in column if letter != "1"}
        if len(letters) > 1:
            return None
        result.append(letters.pop() if letters else "1")
    # The same axis twice is no shape an epilogue can have.
    named = [letter for letter in result if letter != "1"]
    return tuple(reversed(result)) if len(set(named)) == len(named) else None


def promote(kinds: Sequence[Kind]) -> Kind:
    """The higher kind."""
    return max(kinds, key=RANK.__getitem__)


def exact_limit(kind: Kind) -> float:
    """The most steps a value may have so that arithmetic on it is exact."""
    return 2.0**23 if kind == "float" else 2.0**30 if kind == "int" else 2.0**52
