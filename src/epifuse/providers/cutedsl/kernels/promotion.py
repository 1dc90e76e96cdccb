"""Sums of 8-bit floats and of parts of float32: the tensor cores add up a few products, and float32 adds up these sums.

Hopper's tensor cores keep 13 bits below the leading one of a sum of 8-bit floats. Other sums they cut below their last
bit, which is a bias over a long K. A warp group multiplies one piece of its tile at a time, so that the registers of
the piece fit beside those of the sums; while it adds, the multiplications of the other warp group go on.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from epifuse.providers.cutedsl import budget
from epifuse.providers.cutedsl.design import SUBTILE, Design

_BLOCK = 32  # bytes along K that one instruction multiplies
_LEFT = 24  # values that are added behind the next multiplications; 40 spill 28 bytes beside block scales


class Promotion:
    """How a warp group divides a stage: it multiplies one of `pieces` and adds the result, then takes the next one.
    Each piece has `blocks` blocks of K, and is (first block, which rows of 64, which columns)."""

    def __init__(self, design: Design, element: int) -> None:
        """`element` are the bytes of one of A and B."""
        rows, self.columns = design.rows // SUBTILE[0], design.tile[1] // budget.piece(design)
        self.blocks = design.promoted * element // _BLOCK
        first = range(0, design.k_bytes // _BLOCK, self.blocks) if design.promoted else ()
        self.pieces = [(k, row, column) for k in first for row in range(rows) for column in range(self.columns)]

    def piece(self, accumulators: cute.Tensor) -> cute.Tensor:
        """Registers for what the tensor cores add up of a piece."""
        return cute.make_rmem_tensor((accumulators.shape[0], 1, 1), Float32)

    def factors(self, place: int, block: int, a: cute.Tensor, b: cute.Tensor, stage: Any) -> tuple[Any, Any]:
        """What is multiplied for a piece, of a block of K."""
        first, row, column = self.pieces[place]
        return _kept(a[None, row, first + block, stage]), _kept(b[None, column, first + block, stage])

    def add(
        self, place: int, accumulators: cute.Tensor, piece: cute.Tensor, scales: list, *, later: bool
    ) -> list[tuple[int, Any, tuple]]:
        """What the tensor cores made of a piece; times `scales`, value by value and again, where there are some.

        Where it is `later`, the last values are left for `add_left`: which of `accumulators`, the value, its scale.
        """
        _, row, column = self.pieces[place]
        count, left = cute.size(piece), []
        first = count * (row * self.columns + column)  # as the epilogue counts: all columns of 64 rows, then the next
        for i in range(count):
            scale = (scales[i % len(scales)],) if scales else ()
            if later and i >= count - _LEFT:
                left.append((first + i, piece[i], scale))
                piece[i] = Float32(0.0)  # another register for the next multiplication, which does not read it
            else:
                accumulators[first + i], piece[i] = _added(accumulators[first + i], piece[i], *scale)
        return left

    def add_left(self, accumulators: cute.Tensor, left: list[tuple[int, Any, tuple]]) -> None:
        """What `add` left, behind the next piece's multiplications, which so begin earlier."""
        for i, value, scale in left:
            accumulators[i], _ = _added(accumulators[i], value, *scale)


def _added(total: Float32, value: Float32, *scale: Float32) -> tuple[Float32, Float32]:
    """`total` plus `value`, which is multiplied by its scale if there is one; and `value`, which the instruction seems
    to write. Otherwise LLVM would move the addition behind the next multiplication, which writes the same registers.
    Then ptxas would copy the registers, and no two multiplications would overlap."""
    sum_ = "fma.rn.f32 {$w0}, {$r1}, {$r2}, {$r0};" if scale else "add.rn.f32 {$w0}, {$r0}, {$r1};"
    text, read = f"{sum_} mov.b32 {{$w1}}, {{$r1}};", [total, value, *scale]
    found = cute.arch.inline_ptx(text, write_only_types=[Float32, Float32], read_only_args=read)
    return found[0], found[1]


def _kept(fragment: cute.Tensor) -> cute.Tensor:
    """With the mode that an index took."""
    return cute.make_tensor(fragment.iterator, cute.append(fragment.layout, cute.make_layout(1)))
