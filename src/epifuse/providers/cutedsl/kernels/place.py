"""Which rows and columns of a tile belong to a warp group, and to each of its warps."""

import math
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from epifuse.providers.cutedsl import segments
from epifuse.providers.cutedsl.design import MATH_GROUPS, WARPS, Design


class Place(NamedTuple):
    """A tile of the result, and `within`: the number of a warp group among those that share the tile."""

    m: Any
    n: Any
    l: Any
    within: Any


class Division:
    """How warp groups divide the tiles of `design`: they share a tile, taking subtiles in turn, or have a tile each."""

    def __init__(self, design: Design) -> None:
        self.design, (height, width) = design, design.subtile
        self.groups = design.sharing
        self.across = design.columns // width
        self.down = design.rows // height
        self.subtiles = self.across * self.down

    def row(self, down, row, place):
        """Return the row of the result that is row `row` of a warp group's subtile number `down` from above.

        In tensor memory a warp has neighbouring rows of the result, and some of them are in each subtile.
        """
        first, height = place.m * self.design.tile[0], self.design.subtile[0]
        if self.design.in_tensor_memory:
            of_warp = height // WARPS
            return first + (row // of_warp * self.down + down) * of_warp + row % of_warp
        return first + (down * self.groups + place.within) * height + row

    def column(self, right, column, place):
        """Return the column of the result that is column `column` of subtile number `right` from the left."""
        return place.n * self.design.columns + right * self.design.subtile[1] + column

    def pieces(self, inner, column, lane, place):
        """Return column `column` + `lane` of a tile as coordinates in the pieces of N, of which `inner` has the
        extents. None if no reshape cut N, or if tiles cut the pieces.

        `column` is known while tracing, and `lane` never leaves the run of `STEP` columns that `column` is in. So most
        coordinates are known while tracing, too. The kernel then needs no division of a column number, which takes five
        instructions for each value.
        """
        if not inner or self.design.columns % math.prod(inner):
            return None
        found, below = [], 1
        for extent in inner:
            found.append(_step(column, lane, below, extent))
            below *= extent
        return (*found, place.n * (self.design.columns // below) + _step(column, lane, below, self.design.columns))

    def subtile(self, down, right, place):
        """Return the coordinates of a warp group's subtile, in subtiles of the whole result."""
        return (
            place.m * (self.down * self.groups) + down * self.groups + place.within,
            place.n * self.across + right,
        )

    def warp_of_rows(self, place, warp):
        """Return the number of a warp among all warps that have different rows of the result."""
        return (place.m * self.groups + place.within) * WARPS + warp

    def warp_of_all(self, group, warp):
        """Return the number of a warp among all consumer warps of the launch."""
        x, y, z = cute.arch.block_idx()
        z = z // self.design.split if self.design.split > 1 else z
        cta = (z * self.design.cluster[1] + y) * self.design.cluster[0] + x
        return (cta * MATH_GROUPS + group) * WARPS + warp

    def first_and_stride(self, group, step):
        """Return for a warp group: the steps before its first tile, its `Place.within`, the distance of its tiles."""
        if self.design.pingpong:
            return group, Int32(0), step * MATH_GROUPS
        return Int32(0), group, step


def _step(column, lane, below, extent):
    """Return the coordinate of a column along a piece of N: it has `extent` places of `below` columns each."""
    first = column // segments.STEP * segments.STEP
    if below % segments.STEP == 0:
        return column // below % extent
    if segments.STEP % below == 0 and below * extent % segments.STEP == 0:
        return first // below % extent + (column - first + lane) // below
    return (column + lane) // below % extent
