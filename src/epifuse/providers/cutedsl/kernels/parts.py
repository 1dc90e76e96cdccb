"""Two parts of a row: how the rows of B lie in shared memory, and which accumulators belong to which part.

An epilogue may take two *parts* of a row, as halves or every second column. B (N, K) is then *woven*: in a stage,
strips of eight rows of the first part and strips of the second part take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int64

from epifuse.providers.cutedsl import weave
from epifuse.providers.cutedsl.design import SUBTILE
from epifuse.providers.cutedsl.kernels.fragment import Fragment
from epifuse.providers.cutedsl.weave import PARTS, STRIP, Order


class Parts(NamedTuple):
    """Which accumulators of a thread belong to a subtile. `registers` has those of the first subtile, for each part.

    Those of the subtile below lie `down` accumulators further, those of the subtile on the right `right` further.
    """

    registers: tuple[tuple[int, ...], ...]
    down: int
    right: int


def in_turn(column: int, part: int) -> int:
    """Return where a part's own column lies in a tile in which strips of both parts take turns."""
    return (column // STRIP * PARTS + part) * STRIP + column % STRIP


def parts_of(own: Fragment, tile: Fragment, width: int, placed: Callable[[int, int], int]) -> Parts:
    """Return the `Parts` of `own`, the fragment of a subtile, and `tile`, the fragment of 64 rows of a tile.

    The tile has `width` columns of each part. `placed` returns the tile's column of (a part's own column, the part).
    """

    def register(row: int, column: int, part: int) -> int:
        return tile.registers.index((row, placed(column, part)))

    registers = tuple(tuple(register(row, column, part) for row, column in own.registers) for part in range(PARTS))
    row, column = own.registers[0]
    further = register(row, column + SUBTILE[1], 0) - registers[0][0] if width > SUBTILE[1] else 0
    return Parts(registers, len(tile.registers), further)


def lie_apart(b: Any, order: Order) -> bool:
    """Whether a tile has all columns of one part, then all of the other. So it is for halves of a B (N, K, L) that is
    contiguous along N, because TMA brings each half by a separate descriptor."""
    return order == "stacked" and cute.is_static(b.stride[0])


def woven(b: Any, order: Order) -> Any:
    """Return B (N, K, L) with its rows in a tile's order: strips of both parts in turn. No `order`: `b`."""
    if not order:
        return b
    shape, strides = weave.rows(order, b.shape[0] // PARTS, b.stride[0])
    return cute.make_tensor(b.iterator, cute.make_layout((shape, *b.shape[1:]), stride=(strides, *b.stride[1:])))


def sources(b: Any, order: Order) -> tuple[Any, ...]:
    """Return what TMA loads of B (N, K, L): `b` itself, `b` with its rows woven, or one tensor for each part."""
    if not order:
        return (b,)
    half, step = b.shape[0] // PARTS, b.stride[0]
    divisor = 128 // b.element_type.width
    if lie_apart(b, order):
        layout = cute.make_layout((half, *b.shape[1:]), stride=b.stride)
        starts = b.iterator, b.iterator + cute.assume(Int64(half), divby=divisor)
        return tuple(cute.make_tensor(start, layout) for start in starts)
    shape, strides = weave.rows(order, half, Int64(step))
    strides = tuple(cute.assume(stride, divby=divisor) for stride in strides)
    layout = cute.make_layout((shape, *b.shape[1:]), stride=(strides, *b.stride[1:]))
    return (cute.make_tensor(b.iterator, layout),)
