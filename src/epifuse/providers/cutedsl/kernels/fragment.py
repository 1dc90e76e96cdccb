"""Which row and column of a subtile each register of each lane holds: no other file knows how accumulators lie.

This is derived from the partition of an identity tensor, so the layout of another instruction or load can be, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from epifuse.base.lazy import cached_property

ALL_LANES = (1, 2, 4, 8, 16)  # bits of a lane's number
_ROW, _COLUMN = 0, 1


@dataclass(frozen=True)
class Fragment:
    """A warp's part of a subtile. A value's place is that of its register in lane 0, plus a distance for each bit of
    its lane's number.

    `registers` has the (row, column) of each register of lane 0, `lanes` that of the first register of lanes 1, 2, 4, 8
    and 16. A *slot* here is one of the different rows, or of the different columns, of a lane's registers.
    """

    registers: tuple[tuple[int, int], ...]
    lanes: tuple[tuple[int, int], ...]

    @staticmethod
    def of(places: Callable[[int], Sequence[tuple[int, int]]]) -> Fragment:
        """Make a fragment. `places` returns the (row, column) of each register of a lane of the first warp."""
        first, *others = map(places, (0, *ALL_LANES))
        return Fragment(tuple(first), tuple(own[0] for own in others))

    @staticmethod
    def of_accumulators(multiplication: Any, subtile: tuple[int, int]) -> Fragment:
        """Make the fragment of a tiled multiplication's accumulators over a subtile of this shape, while tracing."""
        identity = cute.make_identity_tensor(subtile)
        return Fragment.of(lambda lane: listed(multiplication.get_slice(lane).partition_C(identity)))

    @cached_property
    def by_row(self) -> tuple[tuple[int, ...], ...]:
        """The registers of each slot of rows."""
        return _alike([row for row, _ in self.registers])

    @cached_property
    def by_column(self) -> tuple[tuple[int, ...], ...]:
        """The registers of each slot of columns."""
        return _alike([column for _, column in self.registers])

    @cached_property
    def along_row(self) -> tuple[int, ...]:
        """The bits in which the numbers of the lanes that share a row differ."""
        return self._sharing(_ROW)

    @cached_property
    def along_column(self) -> tuple[int, ...]:
        """The bits in which the numbers of the lanes that share a column differ."""
        return self._sharing(_COLUMN)

    def _sharing(self, axis: int) -> tuple[int, ...]:
        return tuple(bit for bit, place in zip(ALL_LANES, self.lanes, strict=True) if place[axis] == 0)

    def rank(self, lane: Any) -> Any:
        """The number of a lane, from 0, among the lanes that share its rows."""
        if not self.along_row:
            return lane * 0
        return lane // self.along_row[0] % self.sharing_row

    @property
    def sharing_row(self) -> int:
        """How many lanes share a row; their numbers differ in neighbouring bits."""
        return 1 << len(self.along_row)

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """The column of each slot of lane 0, counted from its first column."""
        found = [self.registers[registers[0]][_COLUMN] for registers in self.by_column]
        return tuple(column - found[0] for column in found)

    @property
    def merging_columns(self) -> tuple[tuple[int, int], ...]:
        """How values, one a column, are merged over the lanes that share the columns: steps of (bit, columns kept).

        In each step a lane merges with the lane whose number differs in the bit. If the second half of the columns lies
        as the first half does, each lane keeps one half, the higher lane the second. Otherwise both keep all columns.
        """
        steps, left = [], len(self.columns)
        for bit in reversed(self.along_column):
            half = left // 2
            distances = {self.columns[half + i] - self.columns[i] for i in range(half)}
            left = half if 2 * half == left and len(distances) == 1 else left
            steps.append((bit, left))
        return tuple(steps)


def listed(coordinates: Any) -> list[tuple[int, int]]:
    """The (row, column) of each element of a lane's part of an identity tensor."""
    return [coordinates[i] for i in range(cute.size(coordinates))]


def spread(values: Sequence[Any], slots: Sequence[Sequence[int]]) -> list[Any]:
    """Return the value of each register's slot. `slots` has the registers of each slot."""
    found = {register: value for registers, value in zip(slots, values, strict=True) for register in registers}
    return [found[register] for register in range(len(found))]


def _alike(places: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    slots: dict[int, list[int]] = {}
    for register, place in enumerate(places):
        slots.setdefault(place, []).append(register)
    return tuple(map(tuple, slots.values()))
