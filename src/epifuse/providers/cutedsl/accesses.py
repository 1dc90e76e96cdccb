"""Which way each operand and output could travel, as it lies in memory. Imports no cutlass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from epifuse.providers.cutedsl.addresses import (
    UNCUT,
    Along,
    Inner,
    Modes,
    Strides,
    modes,
    strides_of,
    written,
)
from epifuse.providers.cutedsl.lowering import Lowered, Read, Write
from epifuse.providers.cutedsl.program import Access, Way
from epifuse.request.problem import OperandInfo, Problem, TensorInfo

ALIGNMENT = 16  # bytes: TMA's rule for strides and bases
_WIDEST_STAGED = 4  # bytes: the copies in the accumulator's order are for elements of 8, 16 and 32 bits
Extents = Mapping[str, int]


class Layout(NamedTuple):
    """How an operand or output lies, as far as kernels differ by it; see `Access`."""

    way: Way
    dtype: torch.dtype = torch.float32
    by_rows: bool = True
    pairs: bool = False
    inner: Inner = UNCUT


Lying = tuple[Layout | None, str]
"""How something lies, and why it goes direct. None for an operand that is reshaped in a way that moves its data."""


class Sides(NamedTuple):
    """How each operand and each output could travel in any design, in the order of the graph's loads and outputs.

    None for an operand that is reshaped in a way that would move its data.
    """

    loads: tuple[Access | None, ...]
    stores: tuple[Access, ...]


def sides(work: Lowered, problem: Problem) -> Sides:
    """As shapes, strides and dtypes of this problem decide."""
    lying = iter(layouts(work, problem))
    loads = [_access(each.load.name, each.axes, *next(lying)) for each in work.reads]
    stores = [_access(each.output.name, _varying(each, problem.extents), *next(lying)) for each in work.writes]
    return Sides(tuple(loads), tuple(filter(None, stores)))


def _access(name: str, axes: frozenset[str], layout: Layout | None, why: str) -> Access | None:
    if layout is None:
        return None
    way, dtype, by_rows, pairs, inner = layout
    return Access(name, way, frozenset() if way == "number" else axes, dtype, by_rows, pairs, why, inner)


def layouts(work: Lowered, problem: Problem) -> list[Lying]:
    """Of each operand, then of each output. Asked for every problem."""
    extents, by_name, infos = problem.extents, dict(problem.operands), dict(problem.outputs)
    dtypes = dict(problem.dtypes)
    if work.printed:
        dtypes.update(work.printed)
    found = [_load(each, by_name.get(each.load.name), extents) for each in work.reads]
    for each in work.writes:
        name = each.output.name
        found.append(_store(each, dtypes[name], infos.get(name), extents))
    return found


def _load(read: Read, info: OperandInfo | None, extents: Extents) -> Lying:
    load, axes, way, along = read
    if not isinstance(info, TensorInfo):
        return Layout("number"), ""
    strides = strides_of(info, load)
    if strides is None:
        return None, ""
    if way is not None:
        return Layout(way, info.dtype, inner=_inner(strides, along, extents)), ""
    return _tile(axes, info.dtype, modes(strides, along, extents), _not_by_tma, aligned=info.aligned)


def _store(write: Write, dtype: torch.dtype, info: TensorInfo | None, extents: Extents) -> Lying:
    output, _, way, along = write
    strides = written(output, info, extents)[1]
    if way is not None:
        return Layout(way, dtype, inner=_inner(strides, along, extents)), ""
    where, aligned = modes(strides, along, extents), info is None or info.aligned
    return _tile(_varying(write, extents), dtype, where, _not_written_by_tma, aligned=aligned)


def _varying(write: Write, extents: Extents) -> frozenset[str]:
    """One batch is written as if it varied over batches: the same kernel then serves batched problems."""
    return write.axes | {"l"} if write.way is None and extents["l"] == 1 else write.axes


_Rule = Callable[[Modes, frozenset[str], int], str | None]


def _tile(axes: frozenset[str], dtype: torch.dtype, where: Modes, refused: _Rule, *, aligned: bool) -> Lying:
    """By TMA where it can address the tensor, else direct."""
    size, pairs = dtype.itemsize, aligned and _in_pairs(where)
    why = _unstaged(where, axes, size, aligned=aligned) or refused(where, axes, size)
    if why is not None:
        return Layout("direct", dtype, True, pairs, where.inner), why
    return Layout("tile", dtype, where.strides[1] == 1, pairs), ""


def _unstaged(where: Modes, axes: frozenset[str], size: int, *, aligned: bool) -> str | None:
    """Why a tensor cannot go through shared memory in tiles, or None."""
    if size > _WIDEST_STAGED:
        return f"its values have {8 * size} bits"
    if any(where.inner):
        return "no single stride steps along M, N or the batches"
    if not ("m" in axes and "n" in axes):
        return "it does not vary over both M and N"
    if not aligned:
        return f"it does not start at a multiple of {ALIGNMENT} bytes"
    if 1 not in where.strides[:2]:
        return "neither its rows nor its columns are contiguous"
    return None


def _not_written_by_tma(where: Modes, axes: frozenset[str], size: int) -> str | None:
    # TMA writes whole granules of 16 bytes: a result of one float32 was written with what lies behind it.
    line = size * where.extents[1 if where.strides[1] == 1 else 0]
    if line % ALIGNMENT:
        return f"its contiguous lines of {line} bytes are no multiple of {ALIGNMENT}"
    return _not_by_tma(where, axes, size)


def _not_by_tma(where: Modes, axes: frozenset[str], size: int) -> str | None:
    """Why TMA cannot address a tensor that is contiguous along M or N, or None."""
    (m, n, l), (down, right, deep), _ = where
    steps = [(m, down) if right == 1 else (n, right)]
    if "l" in axes:
        steps.append((l, deep))
    strides = [size * step for extent, step in steps if extent > 1]
    if 0 in strides:
        return "it is expanded: hand in what it was expanded from"
    for stride in strides:
        if stride < 0 or stride % ALIGNMENT:
            return f"a stride of {stride} bytes is no multiple of {ALIGNMENT}"
    return None


def _in_pairs(where: Modes) -> bool:
    """Whether two neighbouring columns always lie beside each other, from an even place on."""
    extents, strides, inner = where
    first = len(inner[0]) + 1  # of the pieces of N
    if strides[first] != 1 or extents[first] % 2:
        return False
    return not any(step % 2 for i, step in enumerate(strides) if extents[i] > 1 and i != first)


def _inner(strides: Strides, along: Along, extents: Extents) -> Inner:
    return UNCUT if along.at is not None else modes(strides, along, extents).inner
