"""Functions of PyTorch that are written in the language itself, and inlined where they are called.

Called on tensors each is plain PyTorch. Formulas and parameters are those of PyTorch's function of the same name.
"""

from __future__ import annotations

import math

from epifuse.fusion.activation import sigmoid
from epifuse.fusion.forms import chunk
from epifuse.fusion.primitives import Value, abs, exp, log1p, maximum, minimum, where

_INFINITY = math.inf


def isnan(x: Value) -> Value:
    """A mask: where x is NaN."""
    return x != x


def isinf(x: Value) -> Value:
    """A mask: where x is infinite."""
    return abs(x) == _INFINITY


def isfinite(x: Value) -> Value:
    """A mask: where x is neither infinite nor NaN."""
    return abs(x) < _INFINITY


def masked_fill(x: Value, mask: Value, value: Value) -> Value:
    """`value` where the mask holds, x elsewhere."""
    return where(mask, value, x)


def clamp_min(x: Value, min: Value) -> Value:  # noqa: A002 - torch's parameter name
    """x, and `min` where x is less. NaN stays NaN."""
    return maximum(x, min)


def clamp_max(x: Value, max: Value) -> Value:  # noqa: A002 - torch's parameter name
    """x, and `max` where x is more. NaN stays NaN."""
    return minimum(x, max)


def lerp(x: Value, end: Value, weight: Value) -> Value:
    """x + weight (end - x), from the nearer end."""
    step = end - x
    return where(abs(weight) < 0.5, x + weight * step, end - step * (1.0 - weight))


def addcmul(x: Value, tensor1: Value, tensor2: Value, *, value: Value = 1) -> Value:
    """x + value tensor1 tensor2."""
    return x + value * tensor1 * tensor2


def addcdiv(x: Value, tensor1: Value, tensor2: Value, *, value: Value = 1) -> Value:
    """x + value tensor1 / tensor2."""
    return x + value * tensor1 / tensor2


def glu(x: Value, dim: int = -1) -> Value:
    """The first half of x along `dim`, times the sigmoid of the second half."""
    first, second = chunk(x, 2, dim)
    return first * sigmoid(second)


def logaddexp(x: Value, y: Value) -> Value:
    """log(exp(x) + exp(y)), without overflow."""
    largest = maximum(x, y)
    distance = where(x == y, 0.0, abs(x - y))  # of equal infinities too
    return largest + log1p(exp(-distance))
