"""How A and B come into shared memory where no TMA brings them: each thread copies its share of a tile's elements.

What lies outside A or B is not read, and zeros come in its place. Copies of 4, 8 and 16 bytes are under way while
others are multiplied; those of fewer bytes, which cp.async does not have, go through registers.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int64
from cutlass.cute.nvgpu import cpasync

_LEAST_BITS = 32  # of a cp.async
_WIDEST_BITS = 128  # which alone may pass by the L1 cache


class Source(NamedTuple):
    """Where a thread's first elements of a tile of A or B lie: in memory, as row and as place along K, in the tile."""

    start: Any
    row: Any
    along_k: Any
    inside: Any


class Copies:
    """The copies of A or B as (rows, K, L), by tiles (rows, K): `vector` elements at once, along K or along rows."""

    def __init__(self, dtype: Any, tile: tuple[int, int], vector: int, threads: int, *, by_k: bool) -> None:
        self.dtype, self.tile, self.vector, self.by_k = dtype, tile, vector, by_k
        along, across = reversed(tile) if by_k else tile
        self.line = along // vector  # threads that copy neighbours
        self.step = threads // self.line
        self.count = across // self.step
        self.by_registers = vector * dtype.width < _LEAST_BITS

    def source(self, tensor: Any, tile: Any, batch: Any, thread: Any) -> Source:
        """Of a tile with this number among the rows, at the start of K."""
        inside = self.place(thread)
        row = tile * self.tile[0] + inside[0]
        first = 0 if _is_woven(tensor) else row
        place = cute.crd2idx((Int64(first), Int64(inside[1]), Int64(batch)), tensor.layout)
        return Source(tensor.iterator + place, row, inside[1], inside)

    def place(self, thread: Any) -> tuple[Any, Any]:
        """Of a thread's first elements in a tile: its row, and along K."""
        along, across = thread % self.line * self.vector, thread // self.line
        return (across, along) if self.by_k else (along, across)

    def steps(self, piece: int = 0, pieces: int = 1) -> list[tuple[int, int]]:
        """How far a thread's copies are from its first one, as rows and along K: all of them, or one piece."""
        steps = [(i * self.step, 0) if self.by_k else (0, i * self.step) for i in range(self.count)]
        return steps[piece::pieces]

    def _exists(self, source: Source, step: tuple[int, int], k: Any, tensor: Any) -> Any:
        place = source.row + step[0], k * self.tile[1] + source.along_k + step[1]
        return cute.elem_less(place, (cute.size(tensor, mode=[0]), tensor.shape[1]))

    def _at(self, source: Source, step: tuple[int, int], k: Any, tensor: Any) -> Any:
        along_k = Int64(k * self.tile[1] + step[1]) * tensor.stride[1]
        if _is_woven(tensor):
            # By divisions, which are shifts: what lies so many rows below depends on the row.
            rows = cute.crd2idx((Int64(source.row + step[0]), 0, 0), tensor.layout)
        else:
            rows = Int64(step[0]) * tensor.stride[0]
        return source.start + (rows + along_k)

    def bring(self, source: Source, tensor: Any, buffer: Any, k: Any, stage: Any) -> None:
        """Start the copies of block `k` of K into a stage."""
        bits = self.vector * self.dtype.width
        mode = cpasync.LoadCacheMode.GLOBAL if bits == _WIDEST_BITS else cpasync.LoadCacheMode.ALWAYS
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=mode), self.dtype, num_bits_per_copy=bits)
        layout = cute.make_layout(((self.vector, 1), 1))
        for step in self.steps():
            exists = cute.make_rmem_tensor((1, 1), Boolean)
            exists[0] = self._exists(source, step, k, tensor)
            place = *[inside + own for inside, own in zip(source.inside, step, strict=True)], stage
            # `align` on a swizzled pointer forgets the swizzle: the offset is promised to be a multiple instead.
            offset = cute.assume(cute.crd2idx(place, buffer.layout), divby=self.vector)
            from_ = self._at(source, step, k, tensor).align(bits // 8)
            to = cute.make_tensor(buffer.iterator + offset, layout)
            cute.copy(atom, cute.make_tensor(from_, layout), to, pred=exists)

    def fetch(self, source: Source, tensor: Any, k: Any, piece: tuple[int, int]) -> Any:
        """A thread's elements of block `k` of K, or the n-th piece of so many, in registers."""
        steps = self.steps(*piece)
        values = cute.make_rmem_tensor(len(steps), self.dtype)
        values.fill(self.dtype(0.0))
        for i, step in enumerate(steps):
            place = self._at(source, step, k, tensor)
            _read_if(self._exists(source, step, k, tensor), values, i, place)
        return values

    def deposit(self, source: Source, values: Any, buffer: Any, stage: Any, piece: tuple[int, int]) -> None:
        """To a stage what was fetched."""
        for i, step in enumerate(self.steps(*piece)):
            place = *[inside + own for inside, own in zip(source.inside, step, strict=True)], stage
            buffer[place] = values[i]


def _is_woven(tensor: Any) -> bool:
    """Whether its rows lie in another order than in tiles (`parts.woven`)."""
    return isinstance(tensor.shape[0], tuple)


@cute.jit
def _read_if(exists: Boolean, values: cute.Tensor, i: cutlass.Constexpr, place: cute.Pointer):
    if exists:
        values[i] = cute.make_tensor(place, cute.make_layout(1))[0]
