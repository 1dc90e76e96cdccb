"""The order in which tiles are worked on: bands of a few clusters along m, walked column by column, for reuse in L2.

Clusters are numbered as the GPU places them: which multiprocessors work on neighbouring tiles matters beside that
(kernel_variants.json#order-of-tiles).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

_HALF = 31


class Divisor(NamedTuple):
    """A run-time divisor whose quotients cost two multiplications: ceil(2^62 / value) in two halves of 31 bits.

    Exact for 0 <= n < 2^31: the excess of value * ceil(2^62 / value) over 2^62 is below `value`, so n / value moves by
    less than n / 2^62, too little to reach the next whole number. Divisions were 5 % of a tile's time at K = 512.
    """

    value: Any
    high: Any
    low: Any


def divisor(value) -> Divisor:
    """On the host."""
    reciprocal = ((Int64(1) << 62) + Int64(value) - 1) // Int64(value)
    return Divisor(Int32(value), reciprocal >> _HALF, reciprocal & ((1 << _HALF) - 1))


def quotient(n, by: Divisor):
    """n // by.value for 0 <= n < 2^31."""
    return Int32((Int64(n) * by.high + ((Int64(n) * by.low) >> _HALF)) >> _HALF)


class Raster(NamedTuple):
    """Clusters along m and n, and how to find the one whose turn it is: `height` and `last` are those of bands."""

    total: Any
    across_m: Any
    each: Divisor
    band: Divisor
    height: Divisor
    last: Divisor


def raster(shape, step, height) -> Raster:
    """On the host: the order for clusters of `step` elements in bands of `height` clusters."""
    across_m, across_n = cute.ceil_div(shape[0], step[0]), cute.ceil_div(shape[1], step[1])
    each = across_m * across_n
    rest = across_m % height
    last = cutlass.select_(rest == 0, Int32(height), rest)
    return Raster(each * shape[2], across_m, divisor(each), divisor(across_n * height), divisor(height), divisor(last))


def tile_of(turn, order: Raster, cluster, place):
    """Coordinates (m, n, l) of a CTA's tile in its cluster's `turn`."""
    l = quotient(turn, order.each)
    rest = turn - l * order.each.value
    band = quotient(rest, order.band)
    within = rest - band * order.band.value
    first = band * order.height.value
    # Only the last band is lower than the others.
    full = first + order.height.value <= order.across_m
    height = Divisor(*(cutlass.select_(full, *pair) for pair in zip(order.height, order.last, strict=True)))
    column = quotient(within, height)
    row = first + within - column * height.value
    return row * cluster[0] + place[0], column * cluster[1] + place[1], l
