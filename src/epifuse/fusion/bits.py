"""Primitives on the bits of integers: `& | ^ ~ << >>`. If all arguments are masks, type inference replaces a primitive
by the logical operation."""

from __future__ import annotations

import operator

import torch

from epifuse.fusion.primitives import Value, primitive

__all__ = ["bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor"]


@primitive("bits", commutative=True, error="amplified", costly=False, may_fail=False, host=operator.and_, symbol="&")
def bitwise_and(x: Value, y: Value) -> Value:
    """The bits that are set in both integers; `logical_and` for masks."""
    return x & y


@primitive("bits", commutative=True, error="amplified", costly=False, may_fail=False, host=operator.or_, symbol="|")
def bitwise_or(x: Value, y: Value) -> Value:
    """The bits that are set in at least one of the integers; `logical_or` for masks."""
    return x | y


@primitive("bits", commutative=True, error="amplified", costly=False, may_fail=False, host=operator.xor, symbol="^")
def bitwise_xor(x: Value, y: Value) -> Value:
    """The bits that are set in exactly one of the integers; for masks, where they differ."""
    return x ^ y


@primitive("bits", commutative=False, error="amplified", costly=False, may_fail=False, host=operator.invert)
def bitwise_not(x: Value) -> Value:
    """All bits inverted, which is -x - 1; `logical_not` for a mask."""
    return ~x


@primitive(
    "integer", commutative=False, error="amplified", costly=False, may_fail=True, host=operator.lshift, symbol="<<"
)
def bitwise_left_shift(x: Value, y: Value) -> Value:
    """x << y for integers; 0 where y is negative or not below the number of bits of x."""
    return torch.bitwise_left_shift(x, y)  # PyTorch's `<<` has no meta kernel for symbolic extents


@primitive(
    "integer", commutative=False, error="amplified", costly=False, may_fail=True, host=operator.rshift, symbol=">>"
)
def bitwise_right_shift(x: Value, y: Value) -> Value:
    """x >> y for integers, rounded down; -1 or 0, by the sign of x, where y is negative or not below the number of bits
    of x."""
    return torch.bitwise_right_shift(x, y)
