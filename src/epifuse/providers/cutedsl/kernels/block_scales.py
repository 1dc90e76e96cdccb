"""Block scales: a sum of 128 products is multiplied by them before float32 adds it up.

A thread reads its own scales from global memory while the stage before is multiplied. Of A it reads one scale for each
of its rows, the same in the four lanes of a row. Of B it reads one for each block of its columns, the same in all
threads. If A and B are exchanged, a thread's scales of A are those of its columns, and its rows lie in one block of B.
If halves of N are woven, a tile has one block of B in each half. No scale takes shared memory, so that A and B keep
their stages, and scales may have any strides.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from epifuse.providers.cutedsl import budget
from epifuse.providers.cutedsl.design import Design
from epifuse.providers.cutedsl.kernels.fragment import listed, spread
from epifuse.providers.cutedsl.weave import PARTS, STRIP, Order
from epifuse.request.scaled import BLOCK

_INSTRUCTIONS = 4  # that multiply one block of K
_OF_LINE = 32  # scales in a line of L2, if they are contiguous


class Side(NamedTuple):
    """Scales of a tile's rows, or of its columns: the tensor, and where each line of scales that a thread needs begins.

    `starts` count elements in 32 bits: with 64 bits they would take registers from the accumulator.
    """

    tensor: Any
    starts: tuple


class Scales(NamedTuple):
    """The scales of a tile. `rows` and `columns` are a `Side` or (), `first` is the number of the first block of K, and
    `coming` has registers with the scales of the next stage, block by block."""

    rows: Any
    columns: Any
    first: Any
    coming: Any


class BlockScales:
    """The scales that `design` has, of A, of B, or of both."""

    def __init__(self, design: Design, order: Order) -> None:
        """`order` is that of the parts of N, if there are any."""
        self.design, (self.of_a, self.of_b) = design, design.scaled
        self.is_stacked = order == "stacked"
        self.width = budget.piece(design)
        self.along = (0, 1) if design.swapped else (1, 0)  # the mode along K, of scales of rows and of columns
        self.steps = design.spans  # blocks of K in a stage; elements have 8 bits

    def split_off_scales(self, tensors: tuple) -> tuple[tuple, tuple]:
        """Split `tensors` into the epilogue's operands and the scales, which come behind them."""
        count = len(tensors) - self.of_a - self.of_b
        return tensors[:count], tensors[count:]

    def begin(self, scales: tuple, place: Any, epilogue: Any, atom: Any, thread: Any, stage: Any) -> Any:
        """Return the `Scales` of a tile from a stage of K on, or (). Start to read those of this stage."""
        if not scales:
            return ()
        is_swapped, block = self.design.swapped, stage * self.steps
        m, n = (place.n, place.m) if is_swapped else (place.m, place.n)
        of_m = self.design.tile[int(is_swapped)]
        of_a: Any = ()
        of_b: Any = ()
        # Each thread prefetches for one block of K. Else each stage waits for memory, which takes longer to answer than
        # the tensor cores take to multiply a few rows.
        if self.of_a:
            for row in range(0, of_m, _OF_LINE):
                _prefetch(scales[0], 0, m * of_m + row, block + thread)
            of_a = _side(scales[0], self._own(place, epilogue, atom, thread), 0)
        if self.of_b:
            lines = self.lines(n, scales[-1].shape[1])
            for line in lines:
                _prefetch(scales[-1], 1, line, block + thread)
            of_b = _side(scales[-1], lines, 1)
        by_row, by_column = (of_b, of_a) if is_swapped else (of_a, of_b)
        count = sum(len(side.starts) for side in (of_a, of_b) if side)
        found = Scales(by_row, by_column, block, cute.make_rmem_tensor(self.steps * count, Float32))
        self.fetch(found, 0)
        return found

    def lines(self, n: Any, blocks: Any) -> list:
        """The blocks of B's columns, `blocks` in all, that tile `n` has: neighbours, or one in each half of N."""
        if self.is_stacked:
            return [part * (blocks // PARTS) + n * self.design.columns // BLOCK for part in range(PARTS)]
        of_n = self.design.tile[0 if self.design.swapped else 1]
        return [(n * of_n + i) // BLOCK for i in range(0, of_n, BLOCK)]

    def _own(self, place, epilogue, atom, thread):
        """The rows of A that a thread has: its rows in each subtile downwards; its columns if A and B are exchanged."""
        identity = cute.make_identity_tensor(self.design.subtile)
        places = listed(atom.get_slice(thread).partition_C(identity))
        fragment, division = epilogue.fragment, epilogue.division
        if self.design.swapped:
            own = [places[registers[0]][1] for registers in fragment.by_column]
            return [division.column(right, column, place) for right in range(division.across) for column in own]
        own = [places[registers[0]][0] for registers in fragment.by_row]
        return [division.row(down, row, place) for down in range(division.down) for row in own]

    def fetch(self, scales: Any, stage: Any) -> None:
        """Start to read the scales of a stage of the tile."""
        if not scales:
            return
        lines = [
            (side.tensor, start, along)
            for side, along in zip(scales[:2], self.along, strict=True)
            if side
            for start in side.starts
        ]
        for step in range(self.steps):
            for i, (tensor, start, along) in enumerate(lines):
                block = scales.first + stage * self.steps + step
                scales.coming[step * len(lines) + i] = self._read(tensor, start, block, along)

    def _read(self, scales, start, block, along):
        """Read one scale; for a block beyond K, the last one."""
        last = scales.shape[along] - 1
        place = scales.iterator + (start + cutlass.min(block, last) * Int32(scales.stride[along]))
        return cute.make_tensor(place, cute.make_layout(1))[0]

    def arrived(self, scales: Any, stage: Any) -> list:
        """Return the scales that came for a stage: for each of its blocks, row by row, a row's scale times a column's.

        A stage may reach beyond K, except for its first block. A and B are 0 there, and scales are set to 0, too. That
        is done here, because right after the read a thread would wait for them.
        """
        if not scales:
            return []
        sides = [(side, along) for side, along in zip(scales[:2], self.along, strict=True) if side]
        lines, found = sum(len(side.starts) for side, _ in sides), []
        for step in range(self.steps):
            block, first, own = scales.first + stage * self.steps + step, step * lines, {}
            for side, along in sides:
                came = [scales.coming[first + i] for i in range(len(side.starts))]
                first += len(came)
                if step:
                    came = [cutlass.select_(block < side.tensor.shape[along], one, Float32(0.0)) for one in came]
                own[along] = came
            rows, columns = (own.get(along, (None,)) for along in self.along)
            found.append([[_product(row, column) for column in columns] for row in rows])
        return found

    def factors(self, taken: list, piece: tuple, epilogue: Any) -> list:
        """The scales of a piece's values (`Promotion.pieces`), in the order of its registers. If there are fewer scales
        than values, they repeat. Empty if nothing is scaled."""
        if not taken:
            return []
        (block, row, column), slots = piece, epilogue.fragment.by_row
        own = taken[block // _INSTRUCTIONS]
        if self.design.swapped and self.of_a:
            slots = epilogue.fragment.by_column
            subtiles = [own[0][i : i + len(slots)] for i in range(0, len(own[0]), len(slots))]
            return [value for values in subtiles for value in spread(values, slots)]
        if self.is_stacked and self.of_b:
            return self._of_parts(own, row, epilogue.fragment)
        across = column * self.width // BLOCK if self.of_b else 0
        if not self.of_a:
            return [own[0][across]]
        return spread([own[row * len(slots) + slot][across] for slot in range(len(slots))], slots)

    def _of_parts(self, own: list, row: int, fragment: Any) -> list:
        """The scales of a subtile's values in 64 rows, number `row`, if strips of both parts of N take turns."""
        slots = fragment.by_row
        places = {register: row * len(slots) + slot for slot, registers in enumerate(slots) for register in registers}
        parts = [column // STRIP % PARTS for _, column in fragment.registers]
        return [own[places[i] if self.of_a else 0][part] for i, part in enumerate(parts)]


def _prefetch(tensor, mode, index, block):
    """Prefetch the line of L2 that has the scale at `index` along a mode, and at `block` along the other mode."""
    index = cutlass.min(index, tensor.shape[mode] - 1) * Int32(tensor.stride[mode])
    block = cutlass.min(block, tensor.shape[1 - mode] - 1) * Int32(tensor.stride[1 - mode])
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[tensor.iterator + (index + block)])


def _side(tensor, indices, mode):
    return Side(tensor, tuple(_start(tensor, index, mode) for index in indices))


def _product(first, second):
    if first is None or second is None:
        return second if first is None else first
    return first * second


def _start(scales, index, mode):
    """Where the scales at `index` along a mode begin; beyond the end, those of the last index. The mov hides how that
    is computed, because ptxas would compute it anew for each block."""
    start = cutlass.min(index, scales.shape[mode] - 1) * Int32(scales.stride[mode])
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[start])
