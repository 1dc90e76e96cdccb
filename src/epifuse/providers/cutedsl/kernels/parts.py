"""Two parts of a row: how the rows of B come to lie in shared memory, and which accumulators are whose."""

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
    """Which accumulators of a thread a subtile has: from its first one on, for each part of a row, and how many further
    the subtile below begins, and the one on the right."""

    registers: tuple[tuple[int, ...], ...]
    down: int
    right: int


def in_turn(column: int, part: int) -> int:
    """The column of a tile that a part's own column is, where strips of both take turns."""
    return (column // STRIP * PARTS + part) * STRIP + column % STRIP


def parts_of(own: Fragment, tile: Fragment, width: int, placed: Callable[[int, int], int]) -> Parts:
    """Of the fragments of a subtile and of 64 rows of a tile, which has `width` columns of each part, as `placed`."""

    def register(row: int, column: int, part: int) -> int:
        return tile.registers.index((row, placed(column, part)))

    registers = tuple(tuple(register(row, column, part) for row, column in own.registers) for part in range(PARTS))
    row, column = own.registers[0]
    further = register(row, column + SUBTILE[1], 0) - registers[0][0] if width > SUBTILE[1] else 0
    return Parts(registers, len(tile.registers), further)


def lie_apart(b: Any, order: Order) -> bool:
    """Whether a tile has the columns of one part beside those of the other: those of B (N, K, L) by rows, of which TMA
    brings each part by a descriptor of its own."""
    return order == "stacked" and cute.is_static(b.stride[0])


def woven(b: Any, order: Order) -> Any:
    """B (N, K, L), its rows in the order in which tiles have them: strips of both parts in turn."""
    if not order:
        return b
    shape, strides = weave.rows(order, b.shape[0] // PARTS, b.stride[0])
    return cute.make_tensor(b.iterator, cute.make_layout((shape, *b.shape[1:]), stride=(strides, *b.stride[1:])))


def sources(b: Any, order: Order) -> tuple[Any, ...]:
    """What TMA brings of B (N, K, L): all of it, its rows woven, or each part."""
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
