"""Promotion of sums: the tensor cores add up a few products, and additions in float32 add up these sums.

It is for 8-bit floats and for parts of float32. Hopper's tensor cores keep 13 bits below the leading one of a sum of
8-bit floats. They cut other sums below the last bit, which is a bias over a long K. A warp group multiplies one piece
of its tile at a time, so that the registers of a piece fit beside those of the sums. While it adds, the multiplications
of the other warp group go on.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from epifuse.providers.cutedsl import budget
from epifuse.providers.cutedsl.design import SUBTILE, Design

_BLOCK = 32  # bytes along K that one instruction multiplies
_DEFERRED_VALUES = 24  # values that are added behind the next multiplications; with 40, 28 bytes spill beside scales


class Promotion:
    """How a warp group divides a stage into `pieces`: it multiplies a piece, adds the result, and takes the next one. A
    piece has `blocks` blocks of K. It is (its first block, which rows of 64, which columns)."""

    def __init__(self, design: Design, element: int) -> None:
        """`element` is the number of bytes of an element of A or B."""
        rows, self.columns = design.rows // SUBTILE[0], design.tile[1] // budget.piece(design)
        self.blocks = design.promoted * element // _BLOCK
        first = range(0, design.k_bytes // _BLOCK, self.blocks) if design.promoted else ()
        self.pieces = [(k, row, column) for k in first for row in range(rows) for column in range(self.columns)]

    def piece(self, accumulators: cute.Tensor) -> cute.Tensor:
        """Registers for the sums that the tensor cores make of a piece."""
        return cute.make_rmem_tensor((accumulators.shape[0], 1, 1), Float32)

    def factors(self, place: int, block: int, a: cute.Tensor, b: cute.Tensor, stage: Any) -> tuple[Any, Any]:
        """The fragments of A and B that are multiplied for piece number `place`, in one of its blocks of K."""
        first, row, column = self.pieces[place]
        return _kept(a[None, row, first + block, stage]), _kept(b[None, column, first + block, stage])

    def add(
        self, place: int, accumulators: cute.Tensor, piece: cute.Tensor, scales: list, *, later: bool
    ) -> list[tuple[int, Any, tuple]]:
        """Add the sums of a piece to `accumulators`, multiplied by `scales` if there are any; this list repeats.

        If `later`, return the last values for `add_left`: (index in `accumulators`, value, (scale,) or ()).
        """
        _, row, column = self.pieces[place]
        count, left = cute.size(piece), []
        first = count * (row * self.columns + column)  # in the epilogue's order: all columns of 64 rows, then the next
        for i in range(count):
            scale = (scales[i % len(scales)],) if scales else ()
            if later and i >= count - _DEFERRED_VALUES:
                left.append((first + i, piece[i], scale))
                piece[i] = Float32(0.0)  # a new register, which the next multiplication does not read
            else:
                accumulators[first + i], piece[i] = _added(accumulators[first + i], piece[i], *scale)
        return left

    def add_deferred(self, accumulators: cute.Tensor, left: list[tuple[int, Any, tuple]]) -> None:
        """Add the values that `add` left. It runs after the next piece's multiplications, so these begin earlier."""
        for i, value, scale in left:
            accumulators[i], _ = _added(accumulators[i], value, *scale)


def _added(total: Float32, value: Float32, *scale: Float32) -> tuple[Float32, Float32]:
    """Return `total` plus `value`, which is multiplied by its scale if there is one; and `value`.

    The instruction seems to write `value`. Otherwise LLVM would move the addition behind the next multiplication, which
    writes the same registers. Then ptxas would copy the registers, and no two multiplications would overlap.
    """
    sum_ = "fma.rn.f32 {$w0}, {$r1}, {$r2}, {$r0};" if scale else "add.rn.f32 {$w0}, {$r0}, {$r1};"
    text, read = f"{sum_} mov.b32 {{$w1}}, {{$r1}};", [total, value, *scale]
    found = cute.arch.inline_ptx(text, write_only_types=[Float32, Float32], read_only_args=read)
    return found[0], found[1]


def _kept(fragment: cute.Tensor) -> cute.Tensor:
    """The fragment with a last mode of one element, in place of the mode that an index removed."""
    return cute.make_tensor(fragment.iterator, cute.append(fragment.layout, cute.make_layout(1)))
