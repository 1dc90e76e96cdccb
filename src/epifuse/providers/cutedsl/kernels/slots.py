"""Blocks of a tile, and their slots: the rows of a block, or segments of rows, of which a thread has elements.

A *walk* computes values subtile by subtile. A warp group finishes all walks over one block before it begins the next
block. A *segment* is a group of neighbouring columns of a row that are reduced together, as a head.
"""

from typing import Any, NamedTuple

from epifuse.ir import Graph
from epifuse.providers.cutedsl import segments
from epifuse.providers.cutedsl.kernels.fragment import Fragment, spread
from epifuse.providers.cutedsl.kernels.place import Division
from epifuse.providers.cutedsl.rows import block


class Places(NamedTuple):
    """Where a thread's slots begin, an entry for each slot.

    `rows` and `columns` count from the start of the result, `down` and `right` from that of the warp group's part of
    the tile. Without segments `columns` has no meaning. `rank` numbers the lanes that have the same slots, from 0.
    """

    rows: list[Any]
    columns: list[Any]
    down: list[Any]
    right: list[Any]
    rank: Any = 0


class Slots:
    """A *slot* is a row of a block, or a segment of such a row. A thread keeps one value for each slot, row by row.

    A block has `down` x `across` subtiles: the warp group's whole part of a tile, or as many columns as hold whole
    segments. If segments of several widths are reduced, each of the finest segments is a slot.
    """

    def __init__(self, graph: Graph, division: Division, fragment: Fragment, *, down_first: bool) -> None:
        self.division, self.fragment, self.subtile = division, fragment, division.design.subtile
        span = block(graph)
        self.finest = next(iter(segments.widths(graph)), 0)
        self.across = span // self.subtile[1] if span else division.across
        self.down = 1 if span and not down_first else division.down
        self.subtiles = self.across * self.down
        self.of_row = span // self.finest if self.finest else 1

    @property
    def count(self) -> int:
        """The number of slots of a thread."""
        return self.down * len(self.fragment.by_row) * self.of_row

    def of(self, down: int, right: int) -> list[int]:
        """The slot of each register of the warp group's subtile at `down` and `right`."""
        by_row = self.fragment.by_row
        rows = spread([down % self.down * len(by_row) + row for row in range(len(by_row))], by_row)
        return [row * self.of_row + self._segment(right, i) for i, row in enumerate(rows)]

    def _segment(self, right: int, register: int) -> int:
        """The number, within a block's row, of the segment that a register is in. It is the same for all lanes."""
        column = right % self.across * self.subtile[1] + self.fragment.registers[register][1]
        return column // self.finest if self.finest else 0

    def first(self, slot: int, width: int) -> int:
        """The first slot of the segment of `width` columns that `slot` is in; `slot` itself if `width` is 0."""
        return slot - slot % self.of_row % (width // self.finest) if width else slot

    def merged(self, spot: Any, width: int) -> dict[int, list[int]]:
        """The registers of the subtile `spot` in each segment of `width` columns, by the segment's first slot."""
        found: dict[int, list[int]] = {}
        for register, slot in enumerate(self.of(spot.down, spot.right)):
            found.setdefault(self.first(slot, width), []).append(register)
        return found

    def places(self, first: tuple[int, int], place: Any, rows: list[Any]) -> Places:
        """Where a block's slots begin. `first` is (down, right) of its first subtile, `rows` a thread's rows in one."""
        pairs = [(first[0] + i, row, j) for i in range(self.down) for row in rows for j in range(self.of_row)]
        in_result = [self.division.row(down, row, place) for down, row, _ in pairs]
        right = [first[1] * self.subtile[1] + j * self.finest for *_, j in pairs]
        columns = [self.division.column(0, column, place) for column in right] if self.finest else in_result
        return Places(in_result, columns, [down * self.subtile[0] + row for down, row, _ in pairs], right)
