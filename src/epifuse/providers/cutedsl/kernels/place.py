"""Which rows and columns of a tile a warp group has, and which of them each of its warps."""

import math
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from epifuse.providers.cutedsl import segments
from epifuse.providers.cutedsl.design import MATH_GROUPS, WARPS, Design


class Place(NamedTuple):
    """A tile of the result, and which of the warp groups that share it has the rows."""

    m: Any
    n: Any
    l: Any
    within: Any


class Division:
    """How warp groups divide the tiles of `design`: they share each, with subtiles in turn, or have a tile each."""

    def __init__(self, design: Design) -> None:
        self.design, (height, width) = design, design.subtile
        self.groups = design.sharing
        self.across = design.columns // width
        self.down = design.rows // height
        self.subtiles = self.across * self.down

    def row(self, down, row, place):
        """Row of the result: row `row` of a warp group's `down`-th subtile from above.

        In tensor memory each warp has rows of its own, one below the other, and some of them in each subtile.
        """
        first, height = place.m * self.design.tile[0], self.design.subtile[0]
        if self.design.in_tensor_memory:
            of_warp = height // WARPS
            return first + (row // of_warp * self.down + down) * of_warp + row % of_warp
        return first + (down * self.groups + place.within) * height + row

    def column(self, right, column, place):
        """Column of the result: column `column` of the `right`-th subtile from the left."""
        return place.n * self.design.columns + right * self.design.subtile[1] + column

    def pieces(self, inner, column, lane, place):
        """Column `column` + `lane` of a tile as coordinates in the pieces of N; None where a reshape did not cut N, or
        where tiles cut the pieces.

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
        """Coordinates of a warp group's subtile, in subtiles of the whole result."""
        return (
            place.m * (self.down * self.groups) + down * self.groups + place.within,
            place.n * self.across + right,
        )

    def warp_of_rows(self, place, warp):
        """Number of a warp among those that have different rows of the result."""
        return (place.m * self.groups + place.within) * WARPS + warp

    def warp_of_all(self, served, warp):
        """Number of a warp among those of the launch that multiply."""
        x, y, z = cute.arch.block_idx()
        z = z // self.design.split if self.design.split > 1 else z
        cta = (z * self.design.cluster[1] + y) * self.design.cluster[0] + x
        return (cta * MATH_GROUPS + served) * WARPS + warp

    def turns(self, served, step):
        """Of a warp group: which tile it starts with, `within` of its places, and its distance between tiles."""
        if self.design.pingpong:
            return served, Int32(0), step * MATH_GROUPS
        return Int32(0), served, step


def _step(column, lane, below, extent):
    """Where a column is along a piece of N, behind pieces of so many columns `below`."""
    first = column // segments.STEP * segments.STEP
    if below % segments.STEP == 0:
        return column // below % extent
    if segments.STEP % below == 0 and below * extent % segments.STEP == 0:
        return first // below % extent + (column - first + lane) // below
    return (column + lane) // below % extent
