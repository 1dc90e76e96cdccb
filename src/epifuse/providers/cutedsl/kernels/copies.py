"""Copies of A and B into shared memory without TMA: each thread copies its share of a tile's elements.

Elements outside A or B are not read; zeros take their place. Copies of 4, 8 and 16 bytes are made by cp.async, while
other stages are multiplied. cp.async cannot copy fewer bytes, so smaller copies go through registers.
"""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint16, Uint32
from cutlass.cute.nvgpu import cpasync

from epifuse.providers.cutedsl.design import K_SPAN
from epifuse.providers.cutedsl.kernels.swizzle import PATTERN_LINES, swizzled

_LEAST_BITS = 32  # of one cp.async
_WIDEST_BITS = 128  # only copies of this width may bypass the L1 cache


class Source(NamedTuple):
    """Where a thread's first elements of a tile of A or B lie. `start` is their address in memory, (`row`, `along_k`)
    their place in the matrix, and `inside` that in the tile. `to` is their address in the first stage before it is
    swizzled, and `below` the number of rows from `row` on; both are None if elements go through registers."""

    start: Any
    row: Any
    along_k: Any
    inside: Any
    to: Any
    below: Any


class Copies:
    """The copies of A or B, (rows, K, L), in tiles (rows, K). A copy has `vector` elements, along K or along rows."""

    def __init__(self, dtype: Any, tile: tuple[int, int], vector: int, threads: int, *, by_k: bool, line: int) -> None:
        """`by_k`: whether neighbours in memory lie along K, or else rows. `line`: bytes of a line of shared memory."""
        self.dtype, self.tile, self.vector, self.by_k = dtype, tile, vector, by_k
        along, across = reversed(tile) if by_k else tile
        self.line = along // vector  # threads that copy one line of a tile
        self.step = threads // self.line
        self.count = across // self.step
        self.by_registers = vector * dtype.width < _LEAST_BITS
        self.size = dtype.width // 8
        self.span = min(line, K_SPAN)

    def source(self, tensor: Any, tile: Any, batch: Any, thread: Any, buffer: Any) -> Source:
        """Return a thread's `Source` in tile number `tile` along the rows, at the start of K."""
        inside = self.place(thread)
        row = tile * self.tile[0] + inside[0]
        first = 0 if _is_woven(tensor) else row
        place = cute.crd2idx((Int64(first), Int64(inside[1]), Int64(batch)), tensor.layout)
        if self.by_registers:
            return Source(tensor.iterator + place, row, inside[1], inside, None, None)
        to = Int32(buffer.iterator.toint()) + self.size * cute.crd2idx((*inside, 0), buffer.layout)
        below = Int32(cute.size(tensor, mode=[0]) - row)
        return Source((tensor.iterator + place).align(self.vector * self.size), row, inside[1], inside, to, below)

    def place(self, thread: Any) -> tuple[Any, Any]:
        """Return (row, place along K) of a thread's first elements in a tile."""
        along, across = thread % self.line * self.vector, thread // self.line
        return (across, along) if self.by_k else (along, across)

    def steps(self, piece: int = 0, pieces: int = 1) -> list[tuple[int, int]]:
        """Return the distances (rows, along K) of a thread's copies from its first one: of all, or of one piece."""
        steps = [(i * self.step, 0) if self.by_k else (0, i * self.step) for i in range(self.count)]
        return steps[piece::pieces]

    def _exists(self, source: Source, step: tuple[int, int], k: Any, tensor: Any) -> Any:
        place = source.row + step[0], k * self.tile[1] + source.along_k + step[1]
        return cute.elem_less(place, (cute.size(tensor, mode=[0]), tensor.shape[1]))

    def _at(self, source: Source, step: tuple[int, int], k: Any, tensor: Any) -> Any:
        along_k = Int64(k * self.tile[1] + step[1]) * tensor.stride[1]
        if _is_woven(tensor):
            # By divisions, which are shifts: the distance to a row further down depends on the row.
            rows = cute.crd2idx((Int64(source.row + step[0]), 0, 0), tensor.layout)
        else:
            rows = Int64(step[0]) * tensor.stride[0]
        return source.start + cute.assume(rows + along_k, divby=max(self.vector, 1))

    def bring(self, source: Source, tensor: Any, buffer: Any, k: Any, stage: Any, piece: tuple[int, int]) -> None:
        """Start the copies of block `k` of K into a stage, or a `piece` (number, count) of them. Beyond K are zeros."""
        bytes_ = self.vector * self.size
        mode = cpasync.LoadCacheMode.GLOBAL if 8 * bytes_ == _WIDEST_BITS else cpasync.LoadCacheMode.ALWAYS
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=mode), self.dtype, num_bits_per_copy=8 * bytes_)
        layout = cute.make_layout(((self.vector, 1), 1))
        before = stage * (self.size * math.prod(self.tile))  # bytes, a whole number of swizzle patterns
        first = swizzled(source.to, self.span) + before
        left = Int32(tensor.shape[1] - k * self.tile[1] - source.along_k)
        # A thread's copies follow one another down the rows, or along K. One comparison says whether a copy exists,
        # because `room` is 0 if the other coordinate lies outside.
        other, own = (left, source.below) if self.by_k else (source.below, left)
        room = cutlass.select_(other > 0, own, Int32(0))
        for step in self.steps(*piece):
            exists = cute.make_rmem_tensor((1, 1), Boolean)
            exists[0] = max(step) < room
            beyond = self.size * cute.crd2idx((*step, 0), buffer.layout)
            # If whole patterns lie between the copies, the address takes one addition, which the instruction does.
            is_whole = beyond % (PATTERN_LINES * self.span) == 0
            place = first + beyond if is_whole else swizzled(source.to + before + beyond, self.span)
            to = cute.make_ptr(self.dtype, place, cute.AddressSpace.smem, assumed_align=bytes_)
            from_ = self._at(source, step, k, tensor)
            cute.copy(atom, cute.make_tensor(from_, layout), cute.make_tensor(to, layout), pred=exists)

    def fetch(self, source: Source, tensor: Any, k: Any, piece: tuple[int, int]) -> Any:
        """Load a thread's elements of block `k` of K, or a `piece` (number, count) of them: 16 bits in a register
        each. With two elements in one register, a load would wait for the one before."""
        steps = self.steps(*piece)
        values = cute.make_rmem_tensor(len(steps), Uint32)
        values.fill(Uint32(0))
        for i, step in enumerate(steps):
            place = cute.recast_ptr(self._at(source, step, k, tensor), dtype=Uint16)
            _read_if(self._exists(source, step, k, tensor), values, i, place)
        return values

    def deposit(self, source: Source, values: Any, buffer: Any, stage: Any, piece: tuple[int, int]) -> None:
        """Store the fetched `values`, a piece of a block, in a stage."""
        for i, step in enumerate(self.steps(*piece)):
            place = *[inside + own for inside, own in zip(source.inside, step, strict=True)], stage
            buffer[place] = Uint16(values[i]).bitcast(self.dtype)


def _is_woven(tensor: Any) -> bool:
    """Whether the rows of a tensor lie in another order than in tiles (`parts.woven`)."""
    return isinstance(tensor.shape[0], tuple)


@cute.jit
def _read_if(exists: Boolean, values: cute.Tensor, i: cutlass.Constexpr, place: cute.Pointer):
    if exists:
        values[i] = Uint32(cute.make_tensor(place, cute.make_layout(1))[0])
