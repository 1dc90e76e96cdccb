"""Integer functions on fragments that round as torch does. CuTe DSL's `//` rounds down, and its `%` takes the sign of
the dividend."""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute

from epifuse.providers.cutedsl.device_math import each

Fragment = Any  # cute.TensorSSA


def floor_divide(x: Fragment, y: Fragment) -> Fragment:
    """x // y, towards minus infinity."""
    return x // y


def remainder(x: Fragment, y: Fragment) -> Fragment:
    """x - y * (x // y), with the sign of y."""
    rest = x % y
    return cute.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


def left_shift(x: Fragment, y: Fragment) -> Fragment:
    """x << y, and 0 where y is negative or at least the number of bits, for which MLIR defines no result."""
    bits = x.element_type.width
    shifted = each(lambda a, b: a << b, x, y & bits - 1, dtype=x.element_type)  # fragments have no shifts in 4.8.1
    return cute.where((y >= 0) & (y < bits), shifted, cute.full_like(x, 0))


def right_shift(x: Fragment, y: Fragment) -> Fragment:
    """x >> y, and -1 or 0 by the sign of x where y is negative or at least the number of bits."""
    last = x.element_type.width - 1
    inside = cute.where((y >= 0) & (y < last), y, cute.full_like(y, last))
    return each(lambda a, b: a >> b, x, inside, dtype=x.element_type)


def power(exponent: int) -> Callable[[Fragment, Fragment], Fragment]:
    """Return x ** exponent, by repeated squaring, for an exponent >= 0 known while compiling. Integers wrap."""

    def row(x: Fragment, _: Fragment) -> Fragment:
        result, square, left = None, x, exponent
        while left:
            if left & 1:
                result = square if result is None else result * square
            left >>= 1
            square = square * square if left else square
        return cute.full_like(x, 1) if result is None else result

    return row
