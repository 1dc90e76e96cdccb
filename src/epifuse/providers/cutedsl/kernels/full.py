"""float32 in full: each element of A and B in two parts of tf32, of which one tf32 product adds up three products.

high is x to nearest tf32, low what is left of it, to nearest again: with 22 bits of x together. Along K lie

    A: low, high, high        B: high, low, high

so that one product of three times K adds up low * high + high * low + high * high, the small sums first: behind large
ones each would be rounded as they are. low * low is below the last bit of float32. What multiplies a low part is 0
where it is not finite: infinities and NaN are in the last third alone, whose products are PyTorch's.

A block of threads reads 32 x 32 elements along whichever mode is nearer to contiguous, and writes them along K.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from epifuse.providers.cutedsl.inputs import PARTS, PARTS_STEP
from epifuse.providers.cutedsl.kernels.modes import exchanged

try:
    from cutlass.memory import SmemAllocator
except ImportError:  # its home in CuTe DSL 4.7
    from cutlass.utils import SmemAllocator

_SIDE, _THREADS = 32, 256  # rows and K of a block's tile, which each thread has four elements of
_LINES = _THREADS // _SIDE  # of it that are read at once
_LOW_OF_A, _LOW_OF_B, _WHOLE = 0, 1, 2  # which third has what
_EXPONENT, _HALF, _KEPT = 0x7F800000, 0x1000, -0x2000  # of float32's bits; half of tf32's last one, and all it keeps


class Source(NamedTuple):
    """A, or B transposed, as (rows, K, L), how many of its L matrices differ, and how many blocks read it."""

    matrix: Any
    copies: Any
    blocks: Any


class Full:
    """The kernel that writes the parts of A and B into the workspace."""

    def launch(self, a, b, workspace, stream):
        """On the host, before the main kernel: A and B for it to multiply, (M, 3 K) and (3 K, N), and what is left of
        the workspace."""
        depth = (a.shape[1] + (PARTS_STEP - 1)) // PARTS_STEP * PARTS_STEP
        sources = _source(a, depth), _source(exchanged(b), depth)
        start, left = workspace.iterator.toint(), Int64(cute.size(workspace))
        found = []
        for one in sources:
            found.append(_memory(start, _parts(one, depth)))
            count = Int64(one.matrix.shape[0]) * one.copies * (PARTS * depth)
            start, left = start + 4 * count, left - count
        (first, second), parts = sources, tuple(found)
        self.kernel(first.matrix, second.matrix, *parts, first.blocks).launch(
            grid=(first.blocks + second.blocks, 1, 1), block=(_THREADS, 1, 1), stream=stream, use_pdl=True
        )
        whole_a, whole_b = (
            _memory(to.iterator.toint(), _whole(one, depth, cute.rank(given)))
            for to, one, given in zip(parts, sources, (a, b), strict=True)
        )
        return whole_a, exchanged(whole_b), (_memory(start, cute.make_layout((left,), stride=(1,))),)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, parts_a: cute.Tensor, parts_b: cute.Tensor, blocks_of_a: Int32):
        block, _, _ = cute.arch.block_idx()
        tile = SmemAllocator().allocate_tensor(Float32, cute.make_layout((_SIDE, _SIDE), stride=(_SIDE + 1, 1)), 16)
        # A and B may be results of the kernel before, which may read the workspace.
        cute.arch.griddepcontrol_wait()
        if block < blocks_of_a:
            self.split(a, parts_a, tile, block, _LOW_OF_A)
        else:
            self.split(b, parts_b, tile, block - blocks_of_a, _LOW_OF_B)

    @cute.jit
    def split(self, matrix: cute.Tensor, parts: cute.Tensor, tile: cute.Tensor, block: Int32, low: Int32):
        """A block's tile."""
        thread, _, _ = cute.arch.thread_idx()
        rows, depth = parts.shape[0], parts.shape[1]
        down, across = _tiles(rows), _tiles(depth)
        first = block // across % down * _SIDE, block % across * _SIDE
        batch = block // across // down
        self.read(matrix, tile, first, batch, thread)
        cute.arch.sync_threads()
        for line in cutlass.range_constexpr(_SIDE // _LINES):
            row, column = thread // _SIDE + line * _LINES, thread % _SIDE
            m, k = first[0] + row, first[1] + column
            if m < rows and k < depth:
                small, finite, whole = split(tile[row, column])
                parts[m, k, low, batch] = small
                parts[m, k, 1 - low, batch] = finite
                parts[m, k, _WHOLE, batch] = whole

    def read(self, matrix, tile, first, batch, thread):
        """All loads of a thread before the first is waited for; zeros beyond the matrix."""
        slow, fast, zero = thread // _SIDE, thread % _SIDE, Float32(0.0)
        along_k = Int64(matrix.stride[1]) <= Int64(matrix.stride[0])
        found = []
        for line in range(0, _SIDE, _LINES):
            row = cutlass.select_(along_k, slow + line, fast)
            column = cutlass.select_(along_k, fast, slow + line)
            m, k = first[0] + row, first[1] + column
            last_m, last_k = matrix.shape[0] - 1, matrix.shape[1] - 1
            value = matrix[cutlass.min(m, last_m), cutlass.min(k, last_k), batch]
            inside = cutlass.select_(m <= last_m, cutlass.select_(k <= last_k, value, zero), zero)
            found.append((row, column, inside))
        for row, column, value in found:
            tile[row, column] = value


def split(x: Any) -> tuple[Any, Any, Any]:
    """low; high where it is finite, else 0; and high."""
    zero = Float32(0.0)
    bits = x.bitcast(Int32)
    near = (bits + _HALF) & _KEPT
    # The largest numbers would become infinite.
    near = Int32(cutlass.select_((near & _EXPONENT) == _EXPONENT, bits & _KEPT, near))
    high = near.bitcast(Float32)
    low = (((x - high).bitcast(Int32) + _HALF) & _KEPT).bitcast(Float32)
    finite = (bits & _EXPONENT) != _EXPONENT
    # A NaN whose bits lie below tf32's would become infinite; a sum is a NaN that has one there.
    return (
        cutlass.select_(finite, low, zero),
        cutlass.select_(finite, high, zero),
        cutlass.select_(finite, high, x + x),
    )


def _tiles(extent):
    return (extent + (_SIDE - 1)) // _SIDE


def _source(matrix, depth):
    """Matrices that are all the same have one copy."""
    if cute.rank(matrix) == 2:
        shape, stride = (*matrix.shape, Int32(1)), (*matrix.stride, Int64(0))
        matrix, copies = cute.make_tensor(matrix.iterator, cute.make_layout(shape, stride=stride)), Int32(1)
    else:
        copies = cutlass.select_(Int64(matrix.stride[2]) == 0, Int32(1), Int32(matrix.shape[2]))
    return Source(matrix, copies, _tiles(matrix.shape[0]) * _tiles(depth) * copies)


def _parts(source, depth):
    """(rows, K, thirds, copies)."""
    rows = source.matrix.shape[0]
    row = Int64(PARTS * depth)
    return cute.make_layout((rows, depth, PARTS, source.copies), stride=(row, 1, Int64(depth), rows * row))


def _whole(source, depth, rank):
    """(rows, 3 K), and L where there are batches; TMA's promises."""
    rows, _, batches = source.matrix.shape
    row = cute.assume(Int64(PARTS * depth), divby=PARTS_STEP)
    if rank == 2:
        return cute.make_layout((rows, PARTS * depth), stride=(row, 1))
    step = cutlass.select_(Int64(source.matrix.stride[2]) == 0, Int64(0), rows * Int64(PARTS * depth))
    return cute.make_layout((rows, PARTS * depth, batches), stride=(row, 1, cute.assume(step, divby=PARTS_STEP)))


def _memory(start, layout):
    return cute.make_tensor(cute.make_ptr(Float32, start, cute.AddressSpace.gmem, assumed_align=16), layout)
