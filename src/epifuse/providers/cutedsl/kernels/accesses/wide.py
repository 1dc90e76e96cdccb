"""Row-major outputs that threads write 16 bytes at a time, without shared memory.

Four lanes share a row, and have two each of eight neighbouring columns. A row of a subtile has four such groups of
eight. The lanes exchange values, so that each has one whole group. 32 columns of a row then leave as whole sectors of
memory.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from epifuse.providers.cutedsl.kernels.accesses.lifecycle import Spot, Stores, Team, Tile
from epifuse.providers.cutedsl.kernels.modes import store_inside
from epifuse.providers.cutedsl.ways import ALIGNMENT, EIGHT


class WideStores(Stores):
    """Outputs whose lines begin and end at multiples of 16 bytes."""

    def store(self, results: Sequence[Any], spot: Spot, tile: Tile, team: Team) -> None:
        fragment, batch = self.scene.fragment, tile.place.l
        for i in self.members:
            rank = fragment.rank(cute.arch.lane_idx())
            column = self.scene.division.column(spot.right, EIGHT * rank, tile.place)
            access, tensor = self.scene.program.stores[i], team.given.outputs[i]
            limits = team.given.limits(access)
            words, size = cute.recast_tensor(results[i], Int32), access.dtype.itemsize
            for registers in fragment.by_row:
                own = [_pair(words, first, size) for first in registers[::2]]
                self._put([word for pair in exchanged(own, rank) for word in pair], tensor, limits, (
                    spot.rows[registers[0]], column, batch))  # fmt: skip

    def _put(self, words: list[Any], tensor: Any, limits: list[Any], place: tuple[Any, Any, Any]) -> None:
        """Store eight columns of a row, 16 bytes at a time."""
        dtype = tensor.element_type
        count, at_once = ALIGNMENT // 4, 8 * ALIGNMENT // dtype.width
        row, column, batch = place
        for part in range(len(words) // count):
            values = cute.make_rmem_tensor(count, Int32)
            for j in range(count):
                values[j] = words[part * count + j]
            start = column + part * at_once
            to = tensor.iterator + cute.crd2idx((row, start, batch), tensor.layout)
            target = cute.make_tensor(to.align(ALIGNMENT), cute.make_layout(at_once))
            store_inside(cute.recast_tensor(values, dtype), target, (row, start, batch), limits)


def _pair(words: Any, first: int, size: int) -> list[Any]:
    """Two neighbouring values, from register `first` on, as words of 32 bits."""
    return [words[first * size // 4 + i] for i in range(size // 2)]


def exchanged(own: Sequence[list[Any]], rank: Any) -> list[list[Any]]:
    """Exchange pairs between four lanes with four each. Return pair `rank` of each; `rank` is this lane's number."""
    found = list(own)
    for bit in (1, 2):
        is_high = rank // bit % 2 == 1
        for low in (place for place in range(len(found)) if not place & bit):
            pairs = zip(found[low], found[low | bit], strict=True)
            found[low], found[low | bit] = map(
                list, zip(*(_swapped(*pair, is_high, bit) for pair in pairs), strict=True)
            )
    return found


def _swapped(low: Any, high: Any, is_high: Any, bit: int) -> tuple[Any, Any]:
    """Exchange a word with the lane whose number differs in `bit`: the lower lane gives `high`, the other one `low`."""
    came = cute.arch.shuffle_sync_bfly(cutlass.select_(is_high, low, high), offset=bit)
    kept = cutlass.select_(is_high, high, low)
    return cutlass.select_(is_high, came, kept), cutlass.select_(is_high, kept, came)
