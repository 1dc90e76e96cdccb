"""The ranges of integers that are computed only from masks and from integers written in the epilogue.

PyTorch computes them in int64, and the kernels in int32. A value that could be beyond int32 is refused in inference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from epifuse.ir import Kind, Node
from epifuse.ir.types import INT32
from epifuse.passes.kinds import KindError

Range = tuple[int, int]
"""The least and the largest value."""

_WHOLE: Range = INT32[0], INT32[-1]
_MOST_BITS = 64  # limit of an exponent or a shift: a result that is beyond int32 by then stays beyond


def _hull(values: Sequence[int]) -> Range:
    return min(values), max(values)


def _multiplied(x: Range, y: Range) -> Range:
    return _hull([a * b for a in x for b in y])


def _absolute(x: Range) -> Range:
    return max(x[0], -x[1], 0), max(map(abs, x))


def _power(base: Range, exponent: Range) -> Range:
    by = exponent[1] if exponent[1] <= _MOST_BITS else _MOST_BITS + exponent[1] % 2  # keeps an even exponent even
    return _hull([x**by for x in (*base, *((0,) if base[0] < 0 < base[1] else ()))])


def _shifted_left(x: Range, by: Range) -> Range:
    return _hull([value << min(count, _MOST_BITS) for value in x for count in by])


def _shifted_right(x: Range, by: Range) -> Range:
    return _hull([value >> count for value in x for count in by])


def _of_bits(x: Range, y: Range) -> Range:
    """All integers that fit into the bits of the wider argument."""
    bits = max((value if value >= 0 else ~value).bit_length() for value in (*x, *y))
    return (0 if min(x[0], y[0]) >= 0 else -(1 << bits)), (1 << bits) - 1


def _and(x: Range, y: Range) -> Range:
    largest = [one[1] for one in (x, y) if one[0] >= 0]
    return (0, min(largest)) if largest else _of_bits(x, y)


def _divided(x: Range, y: Range) -> Range:
    if y[0] <= 0 <= y[1]:
        return -_absolute(x)[1], _absolute(x)[1]
    return _hull([a // b for a in x for b in y])


def _rest(_: Range, y: Range) -> Range:
    return min(y[0] + 1, 0), max(y[1] - 1, 0)


_RANGES: Mapping[str, Callable[..., Range]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": _multiplied,
    "multiply_add": lambda x, y, z: _RANGES["add"](_multiplied(x, y), z),
    "neg": lambda x: (-x[1], -x[0]),
    "abs": _absolute,
    "sign": lambda _: (-1, 1),
    "square": lambda x: _multiplied(_absolute(x), _absolute(x)),
    "relu": lambda x: (max(x[0], 0), max(x[1], 0)),
    "maximum": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "minimum": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "clip": lambda x, low, high: _RANGES["minimum"](_RANGES["maximum"](x, low), high),
    "where": lambda _, x, y: (min(x[0], y[0]), max(x[1], y[1])),
    "pow": _power,
    "floor_divide": _divided,
    "remainder": _rest,
    "bitwise_and": _and,
    "bitwise_or": _of_bits,
    "bitwise_xor": _of_bits,
    "bitwise_not": lambda x: (~x[1], ~x[0]),
    "bitwise_left_shift": _shifted_left,
    "bitwise_right_shift": _shifted_right,
}
_PASSING = frozenset({"debug_print", "one_hot", "region", "pick", "amax", "amin"})


class Ranges:
    """The ranges of the integers whose least and largest values are known."""

    def __init__(self) -> None:
        self._known: dict[Node, Range] = {}

    def follow(self, node: Node, kinds: Sequence[Kind], kind: Kind) -> None:
        """Record the range of a value if the ranges of all its arguments, which have these `kinds`, are known.

        Raises `KindError` if the range goes beyond int32. The result of a cast gets no range: the user asked for it.
        """
        known = [self._of(arg, of) for arg, of in zip(node.args, kinds, strict=True)]
        ranges = [one for one in known if one is not None]
        if kind != "int32" or not known or len(ranges) < len(known) or node.op == "cast":
            return
        name = str({"call": node.attr, "reduce": (node.attr or ("",))[0]}.get(node.op, node.op))
        if name in ("pow", "bitwise_left_shift", "bitwise_right_shift") and ranges[1][0] < 0:
            return
        rule = _RANGES.get(name)
        # A function without a rule may give any int32.
        found = ranges[0] if name in _PASSING else rule(*ranges) if rule else _WHOLE
        if any(value not in INT32 for value in found):
            most = max(found, key=abs)
            raise KindError("wraps", most=str(most) if most.bit_length() < _MOST_BITS else "beyond int64")
        self._known[node] = found

    def _of(self, node: Node, kind: Kind) -> Range | None:
        if node.op == "const" and isinstance(node.attr, int):
            return int(node.attr), int(node.attr)
        return (0, 1) if kind == "mask" else self._known.get(node)
