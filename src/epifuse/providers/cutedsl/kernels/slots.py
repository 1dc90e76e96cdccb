"""Blocks of a tile, which are walked one at a time, and the rows or segments of a block that a thread has."""

from typing import Any, NamedTuple

from epifuse.ir import Graph
from epifuse.providers.cutedsl import segments
from epifuse.providers.cutedsl.kernels.fragment import Fragment, spread
from epifuse.providers.cutedsl.kernels.place import Division
from epifuse.providers.cutedsl.rows import block


class Places(NamedTuple):
    """Where the rows or segments of a thread's slots begin: in the result, and in the warp group's part of the tile.

    `rank` counts the lanes that have the same slots, from 0.
    """

    rows: list[Any]
    columns: list[Any]
    down: list[Any]
    right: list[Any]
    rank: Any = 0


class Slots:
    """A *slot* is a row of a block, or a segment of such a row. A thread keeps one value for each slot, rows first.

    A block is the whole of a warp group's part of a tile, or as many columns as hold whole segments: `down` x `across`
    subtiles. Where segments of several widths are reduced, there is a slot for each of the finest.
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
        """Slots of a thread."""
        return self.down * len(self.fragment.by_row) * self.of_row

    def of(self, down: int, right: int) -> list[int]:
        """For each register of a subtile its slot."""
        by_row = self.fragment.by_row
        rows = spread([down % self.down * len(by_row) + row for row in range(len(by_row))], by_row)
        return [row * self.of_row + self._segment(right, i) for i, row in enumerate(rows)]

    def _segment(self, right: int, register: int) -> int:
        """Of a block's row; all lanes have theirs in the same one."""
        column = right % self.across * self.subtile[1] + self.fragment.registers[register][1]
        return column // self.finest if self.finest else 0

    def first(self, slot: int, width: int) -> int:
        """The first slot in a segment of this width."""
        return slot - slot % self.of_row % (width // self.finest) if width else slot

    def merged(self, spot: Any, width: int) -> dict[int, list[int]]:
        """The registers of a subtile by the first slots of segments of this width."""
        found: dict[int, list[int]] = {}
        for register, slot in enumerate(self.of(spot.down, spot.right)):
            found.setdefault(self.first(slot, width), []).append(register)
        return found

    def places(self, first: tuple[int, int], place: Any, rows: list[Any]) -> Places:
        """Where a block's slots begin; `first` is its first subtile, and `rows` are the thread's of a subtile."""
        pairs = [(first[0] + i, row, j) for i in range(self.down) for row in rows for j in range(self.of_row)]
        in_result = [self.division.row(down, row, place) for down, row, _ in pairs]
        right = [first[1] * self.subtile[1] + j * self.finest for *_, j in pairs]
        columns = [self.division.column(0, column, place) for column in right] if self.finest else in_result
        return Places(in_result, columns, [down * self.subtile[0] + row for down, row, _ in pairs], right)
