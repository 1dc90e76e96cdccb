"""Functions of the epilogue language under CUTLASS's names, and the few functions that only CUTLASS has.

Each is a function for `Compute`, or the register or global reduce function of a reduction.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from epifuse.frontend.hints import absent
from epifuse.fusion.activation import (
    drelu,
    gelu_erf,
    gelu_tanh,
    hardswish,
    identity,
    leaky_relu,
    relu,
    sigmoid,
    silu,
    snake,
)
from epifuse.fusion.primitives import (
    Value,
    abs,
    add,
    clip,
    div,
    maximum,
    minimum,
    mul,
    neg,
    rsqrt,
    sub,
    tanh,
    where,
)
from epifuse.fusion.reduction import absmax, sum_of_squares

plus = atomic_add = add
minus = sub
multiplies = mul
divides = div
negate = neg
absolute_value = abs
inverse_square_root = rsqrt
atomic_maximum = maximum
maximum_absolute_value_reduction = absmax
square_and_plus = sum_of_squares

Identity = identity
ReLU = ReLu = relu
Tanh = tanh
Sigmoid = sigmoid
SiLu = silu
HardSwish = hardswish
GELU = gelu_erf
GELU_taylor = gelu_tanh
dReLU = drelu  # noqa: N816 - CUTLASS's name


def homogeneous_multiply_add(x: Value, y: Value, z: Value) -> Value:
    """x * y + z. It is written out, so that its graph is that of the same formula in a Python function."""
    return x * y + z


multiply_add = homogeneous_multiply_add


def square_difference(x: Value, y: Value) -> Value:
    """(x - y)^2."""
    return (x - y) * (x - y)


def magnitude_squared(x: Value) -> Value:
    """x^2, because all values are real."""
    return x * x


def first(x: Value, y: Value) -> Value:
    """The first argument, x."""
    return x


def lower_bound(x: Value, lower: Value) -> Value:
    """max(x, lower); CUTLASS's LowerBound."""
    return maximum(x, lower)


def threshold_relu(x: Value, threshold: Value, upper_bound: Value) -> Value:
    """min(y, upper_bound), where y is 0 if x is at most the threshold, and else x; CUTLASS's ThresholdReLU."""
    return minimum(where(x <= threshold, 0.0, x), upper_bound)


def elementwise_filter(x: Value, value_to_filter: Value, filtered_value: Value) -> Value:
    """filtered_value where x equals value_to_filter, x elsewhere; CUTLASS's ElementwiseFilter."""
    return where(x == value_to_filter, filtered_value, x)


def drelu_bit(dy: Value, bit: Value) -> Value:
    """dy where the bit is set, 0 elsewhere: CUTLASS's dReLU, but each bit takes one byte."""
    return where(bit != 0, dy, 0.0)


# CUTLASS's activations that have arguments. Each argument is an operand, with CUTLASS's name for it.
LeakyReLU = partial(leaky_relu, negative_slope=("leaky_alpha", 0.01))
Clamp = partial(clip, min="lower_bound", max="upper_bound")
LowerBound = partial(lower_bound, lower="lower_bound")
ThresholdReLU = partial(threshold_relu, threshold=("threshold", 0.0), upper_bound="upper_bound")
ElementwiseFilter = partial(elementwise_filter, value_to_filter="value_to_filter", filtered_value="filtered_value")
Snake = partial(snake, a=("snake_a", 1.0))

if not TYPE_CHECKING:  # with it, a type checker would accept any name
    __getattr__ = absent(globals(), {})
