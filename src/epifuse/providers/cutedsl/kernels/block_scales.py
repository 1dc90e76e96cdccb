"""Block scales: what a sum of 128 products is multiplied by, before float32 adds it up.

A thread reads its own scales from global memory while the stage before theirs is multiplied: of A one for each of its
rows, of which the four lanes of a row read one, of B one for each block of its columns, which all threads read. None
waits in shared memory, so that A and B keep their stages, and scales may lie in any way.
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
    """Of a tile: the scales of A and of B; where those of a thread's rows begin, and those of its columns; which block
    of K is the first; and registers that hold the scales of the stage to come, block by block.

    Places count elements in 32 bits: 64 would take registers of the accumulator's.
    """

    tensors: tuple
    rows: tuple
    columns: tuple
    first: Any
    coming: Any


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
        """For a tile, from a stage of K on, whose scales are on their way then."""
        if not scales:
            return ()
        rows, columns = [], []
        if self.of_a:
            rows = [_start(scales[0], row, 0) for row in self._rows(place, epilogue, atom, thread)]
        if self.of_b:
            first = place.n * self.design.tile[1]
            columns = [_start(scales[-1], (first + i) // BLOCK, 1) for i in range(0, self.design.tile[1], BLOCK)]
        coming = cute.make_rmem_tensor(self.steps * (len(rows) + len(columns)), Float32)
        found = Scales(scales, tuple(rows), tuple(columns), stage * self.steps, coming)
        self.fetch(found, 0)
        return found

    def _rows(self, place, epilogue, atom, thread):
        """The rows of a thread, 64 by 64."""
        identity = cute.make_identity_tensor(self.design.subtile)
        places = listed(atom.get_slice(thread).partition_C(identity))
        own = [places[registers[0]][0] for registers in epilogue.fragment.by_row]
        division = epilogue.division
        return [division.row(down, row, place) for down in range(division.down) for row in own]

    def fetch(self, scales: Any, stage: Any) -> None:
        """Begin to read those of a stage of the tile."""
        if not scales:
            return
        lines = [(scales.tensors[0], start, 1) for start in scales.rows]
        lines += [(scales.tensors[-1], start, 0) for start in scales.columns]
        for step in range(self.steps):
            for i, (tensor, start, along) in enumerate(lines):
                block = scales.first + stage * self.steps + step
                scales.coming[step * len(lines) + i] = self._read(tensor, start, block, along)

    def _read(self, scales, start, block, along):
        """One scale; 0 for a block beyond K. A stage may reach beyond K, and A and B are 0 there, too."""
        last = scales.shape[along] - 1
        place = scales.iterator + (start + cutlass.min(block, last) * Int32(scales.stride[along]))
        value = cute.make_tensor(place, cute.make_layout(1))[0]
        return cutlass.select_(block <= last, value, Float32(0.0)) if self.steps > 1 else value

    def taken(self, scales: Any) -> list:
        """Those of the stage that came: of each of its blocks the products of a row's and a column's, row by row."""
        if not scales:
            return []
        lines, found = len(scales.rows) + len(scales.columns), []
        for step in range(self.steps):
            own = [scales.coming[step * lines + i] for i in range(lines)]
            rows, columns = own[: len(scales.rows)], own[len(scales.rows) :]
            found.append([[_product(row, column) for column in columns or (None,)] for row in rows or (None,)])
        return found

    def factors(self, taken: list, piece: tuple, epilogue: Any) -> list:
        """The scales of a piece's values, in the order of its registers. After the last scale the first one follows
        again. Empty where nothing is scaled."""
        if not taken:
            return []
        (block, row, column), slots = piece, epilogue.fragment.by_row
        own = taken[block // _INSTRUCTIONS]
        across = column * self.width // BLOCK if self.of_b else 0
        if not self.of_a:
            return [own[0][across]]
        return spread([own[row * len(slots) + slot][across] for slot in range(len(slots))], slots)


def _product(first, second):
    if first is None or second is None:
        return second if first is None else first
    return first * second


def _start(scales, index, mode):
    """Where those of a row of blocks begin; of the last one behind the end. ptxas would compute it for each block anew
    if it saw how."""
    start = cutlass.min(index, scales.shape[mode] - 1) * Int32(scales.stride[mode])
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[start])
