"""CUTLASS's names for functions of the epilogue language, and the few it has that the language lacks.

Each is a function for `Compute`, or for a reduction's register and global reduce function.
"""

from __future__ import annotations

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
    multiply_add,
    neg,
    rsqrt,
    sub,
    tanh,
    where,
)
from epifuse.fusion.reduction import absmax, amax, sum, sum_of_squares

plus = atomic_add = add
minus = sub
multiplies = mul
divides = div
negate = neg
absolute_value = abs
inverse_square_root = rsqrt
homogeneous_multiply_add = multiply_add
atomic_maximum = maximum
maximum_absolute_value_reduction = absmax
square_and_plus = sum_of_squares

Identity = identity
ReLU = ReLu = relu
LeakyReLU = leaky_relu
Tanh = tanh
Sigmoid = sigmoid
SiLu = silu
HardSwish = hardswish
GELU = gelu_erf
GELU_taylor = gelu_tanh
Snake = snake
Clamp = clip
dReLU = drelu  # noqa: N816 - CUTLASS's name


def square_difference(x: Value, y: Value) -> Value:
    """(x - y)^2."""
    return (x - y) * (x - y)


def magnitude_squared(x: Value) -> Value:
    """x^2: values here are real."""
    return x * x


def first(x: Value, y: Value) -> Value:
    """x."""
    return x


def lower_bound(x: Value, lower: Value) -> Value:
    """max(x, lower); CUTLASS's LowerBound."""
    return maximum(x, lower)


def threshold_relu(x: Value, threshold: Value, upper_bound: Value) -> Value:
    """min(0 up to the threshold and x above it, upper_bound); CUTLASS's ThresholdReLU."""
    return minimum(where(x <= threshold, 0.0, x), upper_bound)


def elementwise_filter(x: Value, value_to_filter: Value, filtered_value: Value) -> Value:
    """filtered_value where x equals value_to_filter, x elsewhere; CUTLASS's ElementwiseFilter."""
    return where(x == value_to_filter, filtered_value, x)


LowerBound = lower_bound
ThresholdReLU = threshold_relu
ElementwiseFilter = elementwise_filter
maximum_reduction, plus_reduction = amax, sum
