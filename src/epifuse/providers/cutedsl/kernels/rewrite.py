"""A first kernel writes A and B anew before they are multiplied, with K contiguous and padded by zeros.

It copies what TMA cannot address, converts a B of 8 bits to the 16 bits of A, or splits float32 in full: each element
into two parts of tf32, so that one tf32 product adds up three products.

high is x rounded to the nearest tf32, low is the rest, rounded in the same way. Together they have 22 bits of x. Along
K lie

    A: low, high, high        B: high, low, high

so that one product of three times K adds up low * high + high * low + high * high. The small sums come first: added to
large ones, each would be rounded as the large ones are. low * low is below the last bit of float32. The factor of a low
part is 0 if it is not finite: infinities and NaN are in the last third only, whose products are PyTorch's.

A block of threads reads a square of elements along the mode with the smaller stride, and writes it along K. Written
rows begin at lines of L2, because the kernel that multiplies reads them again and again.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32

from epifuse.providers.cutedsl.design import Rewriting
from epifuse.providers.cutedsl.device_types import DTYPES
from epifuse.providers.cutedsl.inputs import LINE, PARTS
from epifuse.providers.cutedsl.kernels.compat import SmemAllocator
from epifuse.providers.cutedsl.kernels.modes import exchanged
from epifuse.providers.cutedsl.kernels.raster import divisor, quotient
from epifuse.providers.cutedsl.kernels.widen import widened

_THREADS = 256
_SIDES = {4: 32, 2: 64}  # rows and K of a block's square by bytes of an element: 4 or 8 KiB of loads at once
_LOW_OF_A, _LOW_OF_B, _WHOLE = 0, 1, 2  # thirds of K: A's low part, B's low part, whole values
_FIRST, _END, _STEP, _WITHIN = range(4)  # of a mode: start of a square, extent, strides in memory and in the square
_EXPONENT, _HALF, _KEPT = 0x7F800000, 0x1000, -0x2000  # bits of float32; half of tf32's last one, all that tf32 keeps


class Source(NamedTuple):
    """A, or B transposed, as (rows, K, L). `copies` of its L matrices differ, and `down` times `across` blocks read one
    matrix."""

    matrix: Any
    copies: Any
    down: Any
    across: Any

    @property
    def blocks(self) -> Any:
        """The number of blocks that read all matrices."""
        return self.down * self.across * self.copies


class Rewrite:
    """The kernel that writes A and B, or one of them, into the workspace."""

    def __init__(self, how: Rewriting, type_: Any) -> None:
        """`type_` is the dtype of A, and of B when it is multiplied."""
        self.parts, self.of_a, self.of_b = how.parts, how.of_a, how.of_b
        self.type, self.bytes = type_, type_.width // 8
        self.narrow = None if how.narrow is None else DTYPES[how.narrow]
        self.side = _SIDES[self.bytes]
        self.lines = _THREADS // self.side  # lines of a square that are read at once
        # A copy moves bits, whatever they mean.
        self.element = Float32 if how.parts == PARTS else Uint32 if self.bytes == 4 else Uint16
        self.at_once = 4 // self.bytes

    def launch(self, a, b, workspace, stream):
        """Called on the host, before the main kernel. Return A and B for it to multiply, as long along K as all parts
        together, and the rest of the workspace."""
        step = 16 // self.bytes  # TMA's rule for strides
        depth = (a.shape[1] + (step - 1)) // step * step
        pair = a, exchanged(b)
        given = [one for one, own in zip(pair, (self.of_a, self.of_b), strict=True) if own]
        sources = [self.source(one, depth) for one in given]
        start, left = workspace.iterator.toint(), Int64(cute.size(workspace))
        found, whole = [], []
        for one, own in zip(sources, given, strict=True):
            found.append(_memory(start, self.written(one, depth), Float32 if self.parts == PARTS else Uint32))
            whole.append(_memory(start, self.whole(one, depth, cute.rank(own)), self.type))
            size = Int64(one.matrix.shape[0]) * one.copies * (self.pitch(depth) * self.bytes)
            start, left = start + size, left - size // (Float32.width // 8)
        matrices, counts = [one.matrix for one in sources], [one.blocks for one in sources]
        squares = tuple((divisor(one.down), divisor(one.across)) for one in sources)
        arguments = *matrices, *found, squares
        kernel = self.kernel(*arguments, counts[0]) if len(given) > 1 else self.kernel_of_one(*arguments)
        kernel.launch(grid=(sum(counts), 1, 1), block=(_THREADS, 1, 1), stream=stream, use_pdl=True)
        rest = _memory(start, cute.make_layout((left,), stride=(1,)), Float32)
        return whole[0] if self.of_a else a, exchanged(whole[-1]) if self.of_b else b, (rest,)

    @cute.kernel
    def kernel(
        self, a: cute.Tensor, b: cute.Tensor, to_a: cute.Tensor, to_b: cute.Tensor, squares: tuple, blocks_of_a: Int32
    ):
        block, _, _ = cute.arch.block_idx()
        tile = self.square()
        # A and B may be results of the kernel before, which may read the workspace.
        cute.arch.griddepcontrol_wait()
        if block < blocks_of_a:
            self.rewrite(a, to_a, tile, block, squares[0], _LOW_OF_A)
        else:
            self.rewrite(b, to_b, tile, block - blocks_of_a, squares[1], _LOW_OF_B)

    @cute.kernel
    def kernel_of_one(self, matrix: cute.Tensor, to: cute.Tensor, squares: tuple):
        block, _, _ = cute.arch.block_idx()
        tile = self.square()
        cute.arch.griddepcontrol_wait()
        self.rewrite(matrix, to, tile, block, squares[0], _LOW_OF_B)

    def square(self):
        """Return the shared memory for a block's square."""
        square = cute.make_layout((self.side, self.side), stride=(self.side + 1, 1))
        return SmemAllocator().allocate_tensor(self.element, square, 16)

    @cute.jit
    def rewrite(
        self, matrix: cute.Tensor, to: cute.Tensor, tile: cute.Tensor, block: Int32, squares: tuple, low: Int32
    ):
        """Read and write the square of a block."""
        thread, _, _ = cute.arch.thread_idx()
        down, across = squares
        above = quotient(block, across)
        batch = quotient(above, down)
        first = (above - batch * down.value) * self.side, (block - above * across.value) * self.side
        self.read(matrix, tile, first, batch, thread)
        cute.arch.sync_threads()
        wide = self.side // self.at_once
        at_once = _THREADS // wide
        row, column = thread // wide, thread % wide
        m, k = first[0] + row, first[1] // self.at_once + column
        if k < to.shape[1]:
            lines = range(0, self.side, at_once)
            narrow = _is_narrow(matrix)
            # All are read before any is stored: within a branch for each line, one would wait for the other.
            made = [self.made(tile, (row + line, column), low, narrow) for line in lines]
            # Addresses advance by addition. With products of 64 bits for each element copies reached 0.48 of the
            # memory's rate (unaligned_products_h200.json).
            place = m * to.stride[0] + k + batch * to.stride[3]
            step = at_once * to.stride[0]
            for i in cutlass.range_constexpr(len(lines)):
                if m + lines[i] < to.shape[0]:
                    for part, value in made[i]:
                        _at(to, place + part * to.stride[2])[0] = value
                place = place + step

    def made(self, tile, own, low, is_narrow):
        """Return pairs (part, 32 bits): the parts of one element, the element itself, or a pair, maybe of 8 bits."""
        row, column = own
        if self.parts == PARTS:
            small, finite, whole = split(tile[row, column])
            return [(low, small), (1 - low, finite), (_WHOLE, whole)]
        if self.at_once == 1:
            return [(0, tile[row, column])]
        first, second = (Uint32(tile[row, self.at_once * column + i]) for i in range(self.at_once))
        if is_narrow:
            return [(0, widened(first & 0xFF | second << Uint8.width, self.narrow, self.type))]
        return [(0, first | second << Uint16.width)]

    @cute.jit
    def read(self, matrix: cute.Tensor, tile: cute.Tensor, first: tuple, batch: Int32, thread: Int32):
        """Read a square. A thread issues all loads before it waits for the first. Beyond the matrix are zeros.

        Neighbouring threads have elements along the `fast` mode. A thread goes down the `slow` one.
        """
        along_k = Int64(matrix.stride[1]) <= Int64(matrix.stride[0])
        k, m = ((first[i], matrix.shape[i], Int64(matrix.stride[i]), tile.stride[i]) for i in (1, 0))
        fast = tuple(cutlass.select_(along_k, of_k, of_m) for of_k, of_m in zip(k, m, strict=True))
        slow = tuple(cutlass.select_(along_k, of_m, of_k) for of_k, of_m in zip(k, m, strict=True))
        column, row = thread % self.side, thread // self.side
        # How many elements there are behind the thread's own place, along either mode.
        right, below = (mode[_END] - 1 - mode[_FIRST] - own for mode, own in ((fast, column), (slow, row)))
        place = batch * Int64(matrix.stride[2])
        place += (fast[_FIRST] + column + cutlass.min(right, 0)) * fast[_STEP]
        place += (slow[_FIRST] + row + cutlass.min(below, 0)) * slow[_STEP]
        step, count = self.lines * slow[_STEP], self.side // self.lines
        element = matrix.element_type
        found = cute.make_rmem_tensor(count, element)
        if fast[_FIRST] + self.side <= fast[_END] and slow[_FIRST] + self.side <= slow[_END]:
            for i in cutlass.range_constexpr(count):
                found[i] = _at(matrix, place)[0]
                place = place + step
        else:
            for i in cutlass.range_constexpr(count):
                value = _at(matrix, place)[0]
                inside = right >= 0 and below >= i * self.lines
                found[i] = cutlass.select_(inside, value, element(0))
                place = place + cutlass.select_(below >= (i + 1) * self.lines, step, Int64(0))
        within = column * fast[_WITHIN] + row * slow[_WITHIN]
        for i in cutlass.range_constexpr(count):
            _at(tile, within)[0] = self.element(found[i])
            within = within + self.lines * slow[_WITHIN]

    def pitch(self, depth):
        """The distance between written rows, in elements."""
        line = LINE // self.bytes
        return (self.parts * depth + (line - 1)) // line * line

    def squares(self, extent):
        """The number of squares along an extent."""
        return (extent + (self.side - 1)) // self.side

    def source(self, matrix, depth):
        """Return the `Source` of a matrix. A batch of one repeated matrix has one copy."""
        bits = Uint8 if _is_narrow(matrix) else self.element
        start = matrix.iterator if self.parts == PARTS else cute.recast_ptr(matrix.iterator, dtype=bits)
        if cute.rank(matrix) == 2:
            shape, stride, copies = (*matrix.shape, Int32(1)), (*matrix.stride, Int64(0)), Int32(1)
        else:
            shape, stride = matrix.shape, matrix.stride
            copies = cutlass.select_(Int64(stride[2]) == 0, Int32(1), Int32(shape[2]))
        matrix = cute.make_tensor(start, cute.make_layout(shape, stride=stride))
        return Source(matrix, copies, self.squares(shape[0]), self.squares(depth))

    def written(self, source, depth):
        """The layout of what is written, (rows, K, parts, copies). If pairs are written at once, K counts pairs."""
        row = Int64(self.pitch(depth) // self.at_once)
        rows, depth = source.matrix.shape[0], depth // self.at_once
        return cute.make_layout((rows, depth, self.parts, source.copies), stride=(row, 1, Int64(depth), rows * row))

    def whole(self, source, depth, rank):
        """The layout of what is multiplied: (rows, K of all parts), and L for batches. TMA accepts its strides."""
        rows, _, batches = source.matrix.shape
        elements = self.parts * depth
        row = cute.assume(Int64(self.pitch(depth)), divby=16 // self.bytes)
        if rank == 2:
            return cute.make_layout((rows, elements), stride=(row, 1))
        step = cutlass.select_(Int64(source.matrix.stride[2]) == 0, Int64(0), rows * Int64(self.pitch(depth)))
        step = cute.assume(step, divby=16 // self.bytes)
        return cute.make_layout((rows, elements, batches), stride=(row, 1, step))


def split(x: Any) -> tuple[Any, Any, Any]:
    """Return low; high, or 0 if x is not finite; and high."""
    zero = Float32(0.0)
    bits = x.bitcast(Int32)
    near = (bits + _HALF) & _KEPT
    # Rounded to nearest, the largest numbers would become infinite: they are cut.
    near = Int32(cutlass.select_((near & _EXPONENT) == _EXPONENT, bits & _KEPT, near))
    high = near.bitcast(Float32)
    low = (((x - high).bitcast(Int32) + _HALF) & _KEPT).bitcast(Float32)
    finite = (bits & _EXPONENT) != _EXPONENT
    # A NaN whose bits all lie below those of tf32 would become infinite. x + x is a NaN with a bit that tf32 keeps.
    return (
        cutlass.select_(finite, low, zero),
        cutlass.select_(finite, high, zero),
        cutlass.select_(finite, high, x + x),
    )


def _is_narrow(matrix):
    """Whether elements have 8 bits. As an argument of a kernel the matrix is of Int8, whatever its dtype was."""
    return matrix.element_type.width == Uint8.width


def _at(tensor, place):
    """The element that lies `place` elements behind the first."""
    return cute.make_tensor(tensor.iterator + place, cute.make_layout(1))


def _memory(start, layout, dtype):
    return cute.make_tensor(cute.make_ptr(dtype, start, cute.AddressSpace.gmem, assumed_align=16), layout)
