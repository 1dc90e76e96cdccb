"""Rasterisation, the order of tiles: bands of a few clusters along M or N, line by line, so that L2 is reused.

On Hopper the multiprocessors of one group (GPC) take neighbouring tiles of this order. Their requests for one line of A
or B are then merged on the way to L2, unless they are multicasts: a multicast of one cluster is never merged with that
of another cluster. So what the CTAs of a cluster do not share should be the same for neighbours in the order
(placement_h200.json).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from epifuse.providers.cutedsl.clusters import GROUPS, rank_words
from epifuse.providers.cutedsl.design import Design

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
    """Make a `Divisor`, on the host."""
    reciprocal = ((Int64(1) << 62) + Int64(value) - 1) // Int64(value)
    return Divisor(Int32(value), reciprocal >> _HALF, reciprocal & ((1 << _HALF) - 1))


def quotient(n, by: Divisor):
    """n // by.value for 0 <= n < 2^31."""
    return Int32((Int64(n) * by.high + ((Int64(n) * by.low) >> _HALF)) >> _HALF)


class Raster(NamedTuple):
    """The order of clusters. `total` is their number, and `across_m` that along M.

    Divisors, in clusters: `each` of a matrix of the batch, `band` of a band, `height` and `last` of the height of a
    band and of the last band.
    """

    total: Any
    across_m: Any
    each: Divisor
    band: Divisor
    height: Divisor
    last: Divisor


def raster(shape, step, height) -> Raster:
    """Make the order, on the host. A cluster has `step` rows and columns of `shape`, a band `height` clusters."""
    across_m, across_n = cute.ceil_div(shape[0], step[0]), cute.ceil_div(shape[1], step[1])
    each = across_m * across_n
    rest = across_m % height
    last = cutlass.select_(rest == 0, Int32(height), rest)
    return Raster(each * shape[2], across_m, divisor(each), divisor(across_n * height), divisor(height), divisor(last))


def tile_of(turn, order: Raster, cluster, place):
    """Return (m, n, l) of a CTA's tile in its cluster's `turn`; `place` is its place in the cluster."""
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


class Turns(NamedTuple):
    """The raster of a persistent grid, and its clusters' ranks, a byte each: in a whole wave, and in the last one.

    A *wave* is as many tiles as all clusters take at once. Turns before `full` are of whole waves.
    """

    raster: Raster
    full: Any
    whole: tuple
    last: tuple

    @property
    def total(self):
        """The number of turns."""
        return self.raster.total


class Order:
    """The order in which clusters take the tiles of `design`."""

    def __init__(self, design: Design, *, by_ranks: bool) -> None:
        self.bands_along_n, self.by_ranks, self.words = design.bands_along_n, by_ranks, rank_words(design.ctas)

    def turns(self, shape, step, band, clusters, table) -> Turns:
        """Make the turns, on the host. `table` is the address of the ranks (`clusters.rank_table`).

        Bands lie along M, or along N if `bands_along_n`. They are as equal in height as possible, and not lower than
        `band`.
        """
        if self.bands_along_n:
            shape, step = (shape[1], shape[0], shape[2]), step[::-1]
        across = cute.ceil_div(shape[0], step[0])
        height = cute.ceil_div(across, cutlass.max(across // band, 1))
        order = raster(shape, step, height)
        left = order.total % clusters
        rows = [self._row(table, count) for count in (clusters, left)] if self.by_ranks else [(), ()]
        return Turns(order, order.total - left, *rows)

    def _row(self, table, count):
        start = table + Int64(count) * (8 * self.words)
        row = cute.make_ptr(Int64, start, cute.AddressSpace.generic, assumed_align=8)
        words = cute.make_tensor(row, cute.make_layout(self.words))
        return tuple(words[i] for i in range(self.words))

    def ranked(self, own, count, turns: Turns):
        """Return the distance from a cluster's turn to its place in the order: in whole waves, and in the last one."""
        if self.by_ranks:
            whole, last = (_byte(words, own) for words in (turns.whole, turns.last))
        else:
            whole, last = (_by_eights(own, each) for each in (count, turns.total - turns.full))
        return whole - own, last - own

    def tile(self, turn, cta, cluster):
        """Return (m, n, l) of a CTA's tile in its cluster's `turn`."""
        place = turn + cutlass.select_(turn < cta.turns.full, *cta.ranks)
        if self.bands_along_n:
            n, m, l = tile_of(place, cta.turns.raster, cluster[::-1], cta.place[::-1])
            return m, n, l
        return tile_of(place, cta.turns.raster, cluster, cta.place)


def _by_eights(own, count):
    """The rank of cluster `own` of `count`, if eight groups of multiprocessors take clusters in turn."""
    group = own % GROUPS
    return group * (count // GROUPS) + cutlass.min(group, count % GROUPS) + own // GROUPS


def _byte(words, index):
    """Return byte `index` of `words`.

    The words are arguments of the kernel. In memory, what was read before this launch would have displaced them.
    """
    word, *others = words
    for i, other in enumerate(others, 1):
        word = cutlass.select_(index // 8 == i, other, word)
    return Int32((word >> Int64(8 * (index % 8))) & 255)
