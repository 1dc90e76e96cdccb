"""Primitives on the bits of integers: `& | ^ ~ << >>`. Of masks alone inference makes logic of them."""

from __future__ import annotations

import operator

import torch

from epifuse.fusion.primitives import Value, primitive

__all__ = ["bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor"]


@primitive("bits", commutative=True, error="amplified", costly=False, may_fail=False, host=operator.and_, symbol="&")
def bitwise_and(x: Value, y: Value) -> Value:
    """The bits that both integers have; of masks `logical_and`."""
    return x & y


@primitive("bits", commutative=True, error="amplified", costly=False, may_fail=False, host=operator.or_, symbol="|")
def bitwise_or(x: Value, y: Value) -> Value:
    """The bits that either integer has; of masks `logical_or`."""
    return x | y


@primitive("bits", commutative=True, error="amplified", costly=False, may_fail=False, host=operator.xor, symbol="^")
def bitwise_xor(x: Value, y: Value) -> Value:
    """The bits that one of the integers has; of masks where they differ."""
    return x ^ y


@primitive("bits", commutative=False, error="amplified", costly=False, may_fail=False, host=operator.invert)
def bitwise_not(x: Value) -> Value:
    """All bits inverted, -x - 1; of a mask `logical_not`."""
    return ~x


@primitive(
    "integer", commutative=False, error="amplified", costly=False, may_fail=True, host=operator.lshift, symbol="<<"
)
def bitwise_left_shift(x: Value, y: Value) -> Value:
    """x << y for integers; 0 where y is negative, or no less than the bits of x."""
    return torch.bitwise_left_shift(x, y)  # of `<<` PyTorch has no meta for symbolic extents


@primitive(
    "integer", commutative=False, error="amplified", costly=False, may_fail=True, host=operator.rshift, symbol=">>"
)
def bitwise_right_shift(x: Value, y: Value) -> Value:
    """x >> y for integers, rounded down; the sign alone where y is negative, or no less than the bits of x."""
    return torch.bitwise_right_shift(x, y)
