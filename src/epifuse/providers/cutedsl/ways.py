"""The ways in which operands and outputs travel between memory and registers, as planning knows them: one row each.

A tensor takes the first way in `WAYS` that is meant for its use in the graph, and that does not refuse its strides. In
the kernel each way is a class of `kernels/accesses`. Imports no cutlass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from epifuse.providers.cutedsl.addresses import UNCUT, Inner, Modes
from epifuse.providers.cutedsl.design import SUBTILE, WARP_GROUP, Design, round_up

ALIGNMENT = 16  # bytes: TMA's rule for strides and bases
EIGHT = 8
"""Neighbouring columns that a thread writes if it writes 16 bytes at a time. In the accumulator four lanes have two of
them each."""
_WIDEST_STAGED = 4  # bytes: copies in the accumulator's order exist for elements of 8, 16 and 32 bits


@dataclass(frozen=True)
class Access:
    """How one operand or output travels.

    - `way`: a name in `WAYS`.
    - `axes`: the axes that it varies over.
    - `by_rows`: whether the rows of a tile are contiguous, or its columns.
    - `pairs`: if it goes direct, whether two neighbouring columns can move at a time.
    - `why`: why it goes direct and not by TMA.
    - `inner`: the extents of the pieces of M, N and L, fastest first and without the last, if a reshape cut an axis and
      no single stride steps over the cut.
    - `repeats`: whether all pieces of N are the same columns, such as angles that are the same for every head.
    - `alike`: how many neighbouring columns have the same element, such as the columns of a head that has one gate. It
      is 1 for a tensor that does not go direct.
    """

    name: str
    way: str
    axes: frozenset[str] = frozenset()
    dtype: torch.dtype = torch.float32
    by_rows: bool = True
    pairs: bool = False
    why: str = field(default="", compare=False)
    inner: Inner = UNCUT
    repeats: bool = False
    alike: int = 1

    @property
    def period(self) -> int:
        """The number of columns that TMA brings repeatedly; 0 if it brings all of N."""
        return self.inner[1][0] if self.repeats and self.travels.staged else 0

    @property
    def pieces(self) -> Inner:
        """The part of `inner` that the kernel's tensor has: none if TMA brings the same columns repeatedly."""
        return UNCUT if self.period else self.inner

    @property
    def bytes_at_once(self) -> int:
        """The bytes that one instruction moves if the tensor goes direct."""
        return self.travels.at_once or self.dtype.itemsize * (2 if self.pairs else 1)

    @property
    def travels(self) -> Way:
        """The row of its way in `WAYS`."""
        return WAYS[self.way]

    @property
    def without_memory(self) -> Access:
        """The same access, without the shared memory that an output takes if threads write it in place."""
        way = self.travels
        return replace(self, way=way.otherwise) if way.in_place and way.otherwise else self


class Use(NamedTuple):
    """What the graph does with an operand or output.

    - `axes`: the axes that it varies over, without the batches.
    - `leaves`: whether it is an output.
    - `late`: whether only merged reductions need it, or make it.
    - `by_line`: whether it has one value for each row or segment, which a walk over the tile completes (`rows.py`).
    - `read_for_other_columns`: whether it is read for other columns than those that are computed from it.
    """

    axes: frozenset[str]
    leaves: bool
    late: bool = False
    by_line: bool = False
    read_for_other_columns: bool = False


class Lying(NamedTuple):
    """How an operand or output lies in memory: where its elements are, the axes that it varies over, the bytes of an
    element (`size`), whether it is aligned for TMA, and whether it `leaves`, as an output."""

    where: Modes
    axes: frozenset[str]
    size: int
    aligned: bool
    leaves: bool


class Way(NamedTuple):
    """One way to travel: when it is chosen, what it needs, and what the rest of planning asks of it."""

    suits: Callable[[Use], bool]
    """Whether the way is meant for this use."""
    arriving: str = ""
    """What a plan tells of an operand. `{size}` stands for the bytes at a time, `{why}` for the refusal of TMA."""
    leaving: str = ""
    """What a plan tells of an output."""
    refuses: Callable[[Lying], str | None] | None = None
    """Why a tensor cannot travel this way as it lies, or None. Without this function the way takes any tensor."""
    otherwise: str | None = None
    """The way to take instead if shared memory has no room; None if there is no other."""
    slots: Callable[[Design], int] = lambda _: 0
    """Elements of a vector that one warp group keeps in shared memory, filled up to whole rounds of its threads."""
    shared_bytes: Callable[[Design, Access, int], int] = lambda *_: 0
    """Bytes of shared memory that one warp group needs. The last argument is the number of stages."""
    staged: bool = False
    """Whether it goes through shared memory by TMA, in subtiles."""
    in_place: bool = False
    """Whether threads read or write it in place, value by value."""
    merged: bool = False
    """Whether it is read or written after all tiles, by the kernel that merges reductions."""
    is_number: bool = False
    """Whether it is a number, which is an argument of the launch."""
    at_once: int = 0
    """Bytes that one instruction moves; 0 if they follow from the dtype."""

    @property
    def by_value(self) -> bool:
        """Whether each subtile reads or writes values of its own."""
        return self.staged or self.in_place


def _columns(design: Design) -> int:
    return _brought(design.columns)


def _rows(design: Design) -> int:
    return _brought(design.rows)


def _brought(extent: int) -> int:
    """The elements that a vector of `extent` values takes in shared memory. Each thread of a warp group brings the same
    number of them, or each of them is brought by the same number of threads."""
    return extent if WARP_GROUP % extent == 0 else round_up(extent, WARP_GROUP)


def _as_words(design: Design, access: Access, _: int) -> int:
    return max(4, access.dtype.itemsize) * access.travels.slots(design)


def _subtiles(design: Design, access: Access, stages: int) -> int:
    return stages * math.prod(design.subtile) * access.dtype.itemsize


def row_of_words(design: Design, size: int) -> int:
    """32-bit words of a row of a subtile in shared memory, padded so that four lanes of eight rows use all banks.

    `size` is the bytes of an element."""
    return design.subtile[1] * size // 4 + 4


def _rows_of_words(design: Design, access: Access, _: int) -> int:
    return 4 * design.subtile[0] * row_of_words(design, access.dtype.itemsize)


def _not_staged(lying: Lying) -> str | None:
    """Why a tensor cannot go through shared memory by TMA, or None."""
    where, axes, size, aligned, leaves = lying
    if size > _WIDEST_STAGED:
        return f"its values have {8 * size} bits"
    if any(where.inner) and not _is_by_heads(where):
        (m, n, l), width = where.inner, SUBTILE[1]
        if len(n) == 1 and n[0] % width and not (m or l):
            return f"its pieces of {n[0]} columns are no multiple of {width}"
        return "no single stride steps along M, N or the batches"
    if not ("m" in axes and "n" in axes):
        return "it does not vary over both M and N"
    if not aligned:
        return f"it does not start at a multiple of {ALIGNMENT} bytes"
    if 1 not in where.strides[:2]:
        return "neither its rows nor its columns are contiguous"
    # TMA writes whole granules of 16 bytes: a result of one float32 also overwrote the bytes behind it.
    line = size * where.extents[1 if where.strides[1] == 1 else 0]
    if leaves and line % ALIGNMENT:
        return f"its contiguous lines of {line} bytes are no multiple of {ALIGNMENT}"
    return _unaddressable(_period(where) if repeats(lying) else where, axes, size)


def _is_by_heads(where: Modes) -> bool:
    """Whether only N is cut, into contiguous pieces of whole subtiles. TMA then has a further dim for the pieces."""
    (m, n, l), strides = where.inner, where.strides
    return not m and not l and len(n) == 1 and n[0] % SUBTILE[1] == 0 and strides[1] == 1


def repeats(lying: Lying) -> bool:
    """Whether all pieces of N of an operand are the same columns in memory."""
    return not lying.leaves and _is_by_heads(lying.where) and lying.where.strides[2] == 0


def _period(where: Modes) -> Modes:
    """The modes of only the columns that repeat."""
    return Modes(where.extents[:2] + where.extents[3:], where.strides[:2] + where.strides[3:])


def _unaddressable(where: Modes, axes: frozenset[str], size: int) -> str | None:
    """Why TMA cannot address a tensor that is contiguous along M or N, or None."""
    *inner, (l, deep) = zip(where.extents, where.strides, strict=True)
    contiguous = 1 if where.strides[1] == 1 else 0
    steps = [step for i, step in enumerate(inner) if i != contiguous]
    if "l" in axes:
        steps.append((l, deep))
    strides = [size * step for extent, step in steps if extent > 1]
    if 0 in strides:
        return "it is expanded: hand in what it was expanded from"
    for stride in strides:
        if stride < 0 or stride % ALIGNMENT:
            return f"a stride of {stride} bytes is no multiple of {ALIGNMENT}"
    return None


def _varies_over(*axes: str) -> Callable[[Use], bool]:
    return lambda use: not use.leaves and use.axes == frozenset(axes)


WAYS: Mapping[str, Way] = {
    "number": Way(lambda _: False, is_number=True),
    "segment": Way(lambda use: use.by_line and "n" in use.axes, leaving="once a segment of a row"),
    "line": Way(lambda use: use.leaves and use.by_line, leaving="once a row, by the CTA that holds where it starts"),
    "finish": Way(
        lambda use: use.late,
        "once, after all tiles",
        "merged by a second kernel in a fixed order",
        merged=True,
    ),
    "scalar": Way(_varies_over(), "one load a tile"),
    "row": Way(_varies_over("n"), "once a tile, through shared memory", slots=_columns, shared_bytes=_as_words),
    "column": Way(_varies_over("m"), "once a tile, through shared memory", slots=_rows, shared_bytes=_as_words),
    "tile": Way(
        lambda use: not use.read_for_other_columns,  # only one subtile of it is in shared memory
        "TMA through shared memory",
        "TMA through shared memory",
        refuses=_not_staged,
        otherwise="direct",
        shared_bytes=_subtiles,
        staged=True,
    ),
    "coalesced": Way(
        lambda _: False,
        leaving="by rows through shared memory, {size} at a time, as {why}",
        otherwise="direct",
        shared_bytes=_rows_of_words,
        in_place=True,
    ),
    "wide": Way(lambda _: False, leaving="direct, {size} at a time, as {why}", in_place=True, at_once=ALIGNMENT),
    "direct": Way(
        lambda use: True, "direct, {size} at a time, as {why}", "direct, {size} at a time, as {why}", in_place=True
    ),
}


def candidates(use: Use) -> tuple[str, ...]:
    """The ways that are meant for a use, the preferred one first. The last one takes a tensor with any strides."""
    meant = [name for name, way in WAYS.items() if way.suits(use)]
    ends = next(i for i, name in enumerate(meant) if WAYS[name].refuses is None)
    return tuple(meant[: ends + 1])
