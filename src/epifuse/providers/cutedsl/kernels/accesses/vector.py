"""Vectors along M or N: fetched into registers before the main loop, and written to shared memory behind it.

They are held as 32-bit values. Each thread of a warp group brings its share of them.
"""

from typing import Any

import cutlass
import cutlass.cute as cute

from epifuse.providers.cutedsl import device_math as dm
from epifuse.providers.cutedsl.design import MATH_GROUPS, WARP_GROUP
from epifuse.providers.cutedsl.kernels.accesses.lifecycle import Fragments, Given, Loads, Spot, Team, Tile
from epifuse.providers.cutedsl.kernels.fragment import spread
from epifuse.providers.cutedsl.kernels.place import Place
from epifuse.providers.cutedsl.kernels.slots import Places


class Vectors(Loads):
    """Operands of which each column, or each row, of a tile has one value."""

    deposits = True

    def _is_row(self, i: int) -> bool:
        return "n" in self.scene.loads[i].axes

    def _slots(self, i: int) -> int:
        return self.scene.loads[i].travels.slots(self.scene.design)

    def _own(self, i: int, thread: Any) -> list:
        """The numbers of the values that a thread brings. With fewer values than threads, neighbours bring the same."""
        slots = self._slots(i)
        if slots < WARP_GROUP:
            return [thread // (WARP_GROUP // slots)]
        return [first + thread for first in range(0, slots, WARP_GROUP)]

    def allocate(self, allocator: Any) -> Any:
        def vector(i: int) -> Any:
            layout = cute.make_layout((self._slots(i), MATH_GROUPS))
            return allocator.allocate_tensor(self.scene.held(i), layout, 16)

        return [vector(i) for i in self.members]

    def fetch(self, place: Place, thread: Any, given: Given) -> dict[int, Any]:
        division, shape, held = self.scene.division, given.shape, {}
        height = self.scene.design.subtile[0]
        for i in self.members:
            own = self._own(i, thread)
            values = cute.make_rmem_tensor(len(own), self.scene.held(i))
            for j, at in enumerate(own):
                if self._is_row(i):
                    column = cutlass.min(division.column(0, at, place), shape[1] - 1)
                    values[j] = given.tensors[i][0, column, place.l].to(self.scene.held(i))
                else:
                    row = cutlass.min(division.row(at // height, at % height, place), shape[0] - 1)
                    values[j] = given.tensors[i][row, 0, place.l].to(self.scene.held(i))
            held[i] = values
        return held

    def deposit(self, held: Fragments, own: Any, group: Any, thread: Any) -> None:
        for i, buffer in zip(self.members, own, strict=True):
            for j, at in enumerate(self._own(i, thread)):
                buffer[at, group] = held[i][j]

    def arrive(self, walk: int, s: int, team: Team) -> dict[int, Any]:
        """Read ahead if outputs are staged, and there is one walk only.

        Staging an output would hold back a later read of shared memory, and the arithmetic that waits for this read
        (kernel_variants.json#vectors-ahead). With several walks there are no registers for values read ahead.
        """
        scene = self.scene
        if len(scene.walks) > 1 or not any(access.travels.staged for access in scene.program.stores):
            return {}
        read = [scene.numbers[node] for node in scene.walks[walk].nodes if node in scene.numbers]
        return {i: self._values(i, *scene.walked(s), team) for i in self.members if i in read}

    def visit(self, i: int, like: Any, spot: Spot, tile: Tile, team: Team) -> Any:
        return self._values(i, spot.down, spot.right, team)

    def _buffer(self, i: int, team: Team) -> Any:
        return team.shared.own[self.number][self.members.index(i)]

    def _values(self, i: int, down: Any, right: Any, team: Team) -> Any:
        buffer, fragment = self._buffer(i, team), self.scene.fragment
        height, width = self.scene.design.subtile
        if self._is_row(i):
            slots, places = fragment.by_column, [right * width + column for column in team.columns]
        else:
            slots, places = fragment.by_row, [down * height + row for row in team.rows]
        found = [buffer[place, team.group] for place in places]
        return dm.fragment(spread(found, slots), team.shape, buffer.element_type)

    def rows(self, i: int, like: Any, places: Places, tile: Tile, team: Team) -> Any:
        buffer = self._buffer(i, team)
        found = [buffer[at, team.group] for at in (places.right if self._is_row(i) else places.down)]
        return dm.fragment(found, (len(found),), buffer.element_type)
