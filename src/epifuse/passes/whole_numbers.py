"""How large integers get that are made of masks and of Python's integers alone.

PyTorch computes these in int64, and the kernels in int32: what could be beyond int32 is refused when it is inferred.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from epifuse.ir import Kind, Node
from epifuse.ir.types import INT32
from epifuse.passes.kinds import KindError

Range = tuple[int, int]
"""The least and the largest value."""

_MOST_BITS = 64  # of an exponent or a shift that counts: what is beyond int32 then stays beyond


def _of(values: Sequence[int]) -> Range:
    return min(values), max(values)


def _power(base: Range, exponent: Range) -> Range:
    powers = [x ** min(e, _MOST_BITS) for x in (*base, *((0,) if base[0] < 0 < base[1] else ())) for e in exponent]
    return _of(powers)


def _shifted(x: Range, by: Range) -> Range:
    return _of([value << min(count, _MOST_BITS) for value in x for count in by])


_RANGES: Mapping[str, Callable[..., Range]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": lambda x, y: _of([a * b for a in x for b in y]),
    "multiply_add": lambda x, y, z: _RANGES["add"](_RANGES["mul"](x, y), z),
    "neg": lambda x: (-x[1], -x[0]),
    "abs": lambda x: (max(x[0], -x[1], 0), max(map(abs, x))),
    "maximum": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "minimum": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "where": lambda _, x, y: (min(x[0], y[0]), max(x[1], y[1])),
    "pow": _power,
    "bitwise_left_shift": _shifted,
}


class Ranges:
    """Of the values that are known."""

    def __init__(self) -> None:
        self._known: dict[Node, Range] = {}

    def follow(self, node: Node, args: Sequence[Node], kinds: Sequence[Kind], kind: Kind) -> None:
        """Note the range of a result where it follows from those of its arguments. Raises `KindError` beyond int32."""
        rule, known = _RANGES.get(node.op), [self._of(arg, of) for arg, of in zip(args, kinds, strict=True)]
        ranges = [one for one in known if one is not None]
        if kind != "int32" or rule is None or len(ranges) < len(known):
            return
        if node.op in ("pow", "bitwise_left_shift") and ranges[1][0] < 0:
            return
        found = self._known[node] = rule(*ranges)
        if any(value not in INT32 for value in found):
            raise KindError("wraps", most=str(max(found, key=abs)))

    def _of(self, node: Node, kind: Kind) -> Range | None:
        if node.op == "const" and isinstance(node.attr, int):
            return int(node.attr), int(node.attr)
        return (0, 1) if kind == "mask" else self._known.get(node)
