"""Row-major outputs that TMA cannot address: they go through shared memory, so that a warp writes whole rows.

Four lanes of a warp lie side by side in each of eight rows. If lanes store their accumulators directly, 16-bit values
take a sector of memory for eight bytes, twice. Then 4095 x 4095 x 4104 took 323 us on an H100, and 4096 cubed by TMA
took 202 (benchmarks/unaligned.py).
"""

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Uint16, Uint32

from epifuse.providers.cutedsl.design import MATH_GROUPS, WARP_GROUP, WARPS
from epifuse.providers.cutedsl.kernels.accesses.lifecycle import Spot, Stores, Team, Tile
from epifuse.providers.cutedsl.kernels.fragment import spread
from epifuse.providers.cutedsl.kernels.modes import store_inside
from epifuse.providers.cutedsl.ways import row_of_words

_LANES = 32
_BITS = {2: Uint16, 4: Uint32}


class CoalescedStores(Stores):
    """Outputs of 16 and 32 bits."""

    def allocate(self, allocator: Any) -> Any:
        height = self.scene.design.subtile[0]

        def buffer(i: int) -> Any:
            row = row_of_words(self.scene.design, self.scene.program.stores[i].dtype.itemsize)
            layout = cute.make_layout((height, row, MATH_GROUPS), stride=(row, 1, height * row))
            return allocator.allocate_tensor(Int32, layout, 16)

        return [buffer(i) for i in self.members]

    def store(self, results: Sequence[Any], spot: Spot, tile: Tile, team: Team) -> None:
        for i, buffer in zip(self.members, team.shared.own[self.number], strict=True):
            self._deposit(results[i], buffer, self.scene.program.stores[i].dtype.itemsize, team)
            cute.arch.sync_warp()
            self._write(i, buffer, spot, tile, team)
            cute.arch.sync_warp()

    def _deposit(self, values: Any, buffer: Any, size: int, team: Team) -> None:
        """Write a thread's values, two of 16 bits at a time: neighbouring registers are neighbouring columns."""
        fragment, words, each = self.scene.fragment, cute.recast_tensor(values, Int32), 4 // size
        rows, columns = spread(team.rows, fragment.by_row), spread(team.columns, fragment.by_column)
        for v in range(0, team.count, each):
            buffer[rows[v], columns[v] // each, team.group] = words[v // each]

    def _write(self, i: int, buffer: Any, spot: Spot, tile: Tile, team: Team) -> None:
        """Write the rows that this warp deposited to memory: each lane takes an element of a row. Several elements are
        read into separate registers before one is stored: a store right after its read waits for shared memory."""
        access, tensor, division = self.scene.program.stores[i], team.given.outputs[i], self.scene.division
        (height, width), size = self.scene.design.subtile, access.dtype.itemsize
        row_words, _, group_words = buffer.layout.stride
        start = cute.recast_ptr(buffer.iterator, dtype=_BITS[size]) + team.group * (4 // size * group_words)
        target = cute.recast_ptr(tensor.iterator, dtype=_BITS[size])
        limits = team.given.limits(access)
        own, count = height // WARPS, height // WARPS * width // _LANES
        at = [team.thread % _LANES + v * _LANES for v in range(count)]
        places = [(team.thread // _LANES * own + x // width, x % width) for x in at]
        together = self._together(count)
        for first in range(0, count, together):
            some = places[first : first + together]
            values = [Uint32((start + (down * (4 // size * row_words) + across)).load()) for down, across in some]
            for (down, across), word in zip(some, values, strict=True):
                row, column = division.row(spot.down, down, tile.place), division.column(spot.right, across, tile.place)
                place = row, column, tile.place.l
                value = cute.make_rmem_tensor(1, _BITS[size])
                value[0] = _BITS[size](word)
                to = cute.make_tensor(target + cute.crd2idx(place, tensor.layout), cute.make_layout(1))
                store_inside(value, to, place, limits)

    def _together(self, count: int) -> int:
        """How many elements are read before one is stored: few beside so many accumulators that all would spill."""
        design = self.scene.design
        return min(count, 4) if design.rows * design.tile[1] > WARP_GROUP * WARP_GROUP else count
