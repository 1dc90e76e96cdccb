"""Block scales: what a sum of 128 products is multiplied by, before float32 adds it up.

A thread reads its own scales from global memory while the products that they are for are multiplied: of A one for each
of its rows, of which the four lanes of a row read one, of B one for the columns of a piece, which all threads read. No
scale waits in shared memory or in a register, beside accumulators that leave few, and scales may lie in any way.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from epifuse.providers.cutedsl import budget
from epifuse.providers.cutedsl.design import Design
from epifuse.providers.cutedsl.kernels.fragment import listed, spread
from epifuse.request.scaled import BLOCK

_INSTRUCTIONS = 4  # that multiply a block of K


class Scales(NamedTuple):
    """Of a tile: the scales of A and of B; where those of a thread's rows begin, and those of pieces of columns; and
    which block of K is the first. Places count elements in 32 bits: 64 would take registers of the accumulator's."""

    tensors: tuple
    rows: tuple
    columns: tuple
    first: Any


class BlockScales:
    """The scales that `design` has, of A, of B, or of both."""

    def __init__(self, design: Design) -> None:
        self.design, (self.of_a, self.of_b) = design, design.scaled
        self.width = budget.piece(design)
        self.steps = design.spans  # blocks of a stage, whose elements have 8 bits

    def apart(self, tensors: tuple) -> tuple[tuple, tuple]:
        """The epilogue's operands, and behind them the scales."""
        count = len(tensors) - self.of_a - self.of_b
        return tensors[:count], tensors[count:]

    def begin(self, scales: tuple, place: Any, epilogue: Any, atom: Any, thread: Any, stage: Any) -> Any:
        """For a tile, from a stage of K on."""
        rows, columns = [], []
        if self.of_a:
            rows = [_start(scales[0], row, 0) for row in self._rows(place, epilogue, atom, thread)]
        if self.of_b:
            first = place.n * self.design.tile[1]
            columns = [_start(scales[-1], (first + i) // BLOCK, 1) for i in range(0, self.design.tile[1], self.width)]
        return Scales(scales, tuple(rows), tuple(columns), stage * self.steps) if scales else ()

    def _rows(self, place, epilogue, atom, thread):
        """The rows of a thread, 64 by 64."""
        identity = cute.make_identity_tensor(self.design.subtile)
        places = listed(atom.get_slice(thread).partition_C(identity))
        own = [places[registers[0]][0] for registers in epilogue.fragment.by_row]
        division = epilogue.division
        return [division.row(down, row, place) for down in range(division.down) for row in own]

    def factors(self, scales: Any, stage: Any, piece: tuple, epilogue: Any) -> list:
        """What the values of a piece are multiplied by, in order and again from the first one on; none where nothing
        is scaled."""
        if not scales:
            return []
        block, row, column = piece
        at, slots = scales.first + stage * self.steps + block // _INSTRUCTIONS, epilogue.fragment.by_row
        own = scales.rows[row * len(slots) : (row + 1) * len(slots)]
        of_rows = [self._read(scales.tensors[0], start, at, 1) for start in own]
        of_columns = [self._read(scales.tensors[-1], start, at, 0) for start in scales.columns[column : column + 1]]
        if not of_rows:
            return of_columns
        return spread([value * other for value in of_rows for other in of_columns] or of_rows, slots)

    def _read(self, scales, start, block, along):
        """One of them; behind K, where a stage may end, 0, as A and B are there."""
        last = scales.shape[along] - 1
        inside = cutlass.min(block, last) if self.steps > 1 else block
        place = scales.iterator + (start + inside * Int32(scales.stride[along]))
        value = cute.make_tensor(place, cute.make_layout(1))[0]
        return cutlass.select_(block <= last, value, Float32(0.0)) if self.steps > 1 else value


def _start(scales, index, mode):
    """Where those of a row of blocks begin; of the last one behind the end. ptxas would compute it for each block anew
    if it saw how."""
    start = cutlass.min(index, scales.shape[mode] - 1) * Int32(scales.stride[mode])
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[start])
