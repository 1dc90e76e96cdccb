"""In which way each operand and output could travel, given its memory layout. Imports no cutlass.

A tensor travels between memory and the registers of the epilogue in one of the ways of `ways.py`: in tiles by TMA, as a
vector through shared memory, direct (value by value), and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from epifuse.providers.cutedsl.addresses import (
    UNCUT,
    Along,
    Inner,
    Modes,
    Strides,
    modes,
    seen,
    written,
)
from epifuse.providers.cutedsl.design import MMA_SYNC, TCGEN05
from epifuse.providers.cutedsl.lowering import Lowered, Read, Write
from epifuse.providers.cutedsl.ways import WAYS, Access, Lying, repeats
from epifuse.request.problem import OperandInfo, Problem, TensorInfo

Extents = Mapping[str, int]


class Layout(NamedTuple):
    """The memory layout of an operand or output, as far as kernels differ by it. The fields are those of `Access`."""

    way: str
    dtype: torch.dtype = torch.float32
    by_rows: bool = True
    pairs: bool = False
    inner: Inner = UNCUT
    repeats: bool = False
    alike: int = 1


LayoutAndReason = tuple[Layout | None, str]
"""A layout, and why the tensor goes direct ("" if it does not). None for an operand whose reshape would move data."""


class Sides(NamedTuple):
    """How each operand and each output could travel in any design, in the order of the graph's loads and outputs.

    None for an operand that is reshaped in a way that would move its data.
    """

    loads: tuple[Access | None, ...]
    stores: tuple[Access, ...]


def sides(work: Lowered, problem: Problem) -> Sides:
    """Return how operands and outputs could travel with the shapes, strides and dtypes of this problem."""
    lying = iter(layouts(work, problem))
    loads = [_access(each.load.name, each.axes, *next(lying)) for each in work.reads]
    stores = [_access(each.output.name, _varying(each, problem.extents), *next(lying)) for each in work.writes]
    return Sides(tuple(loads), tuple(filter(None, stores)))


_WITHOUT_TMA: Mapping[str, str] = {
    MMA_SYNC: "mma.sync's kernel has no TMA",
    TCGEN05: "tcgen05's kernel has TMA for A and B alone",
}


def carried(own: Sides, instruction: str) -> Sides:
    """Return `own` with everything direct that the kernel of `instruction` cannot move by TMA."""
    why = _WITHOUT_TMA.get(instruction)
    if why is None:
        return own
    loads = tuple(None if access is None else _direct(access, why) for access in own.loads)
    return Sides(loads, tuple(_direct(access, why, wide=access.by_rows) for access in own.stores))


def _direct(access: Access, why: str, *, wide: bool = False) -> Access:
    """Return the access without TMA. `wide` outputs are stored 16 bytes at a time, which is safe for what TMA could
    address: its lines begin and end at multiples of 16 bytes."""
    if not access.travels.staged:
        return access.without_memory
    way = "wide" if wide and access.dtype.itemsize in (2, 4) else access.travels.otherwise
    return replace(access, way=way or access.way, why=why)


def _access(name: str, axes: frozenset[str], layout: Layout | None, why: str) -> Access | None:
    if layout is None:
        return None
    varying = frozenset[str]() if WAYS[layout.way].is_number else axes
    return Access(name=name, axes=varying, why=why, **layout._asdict())


def layouts(work: Lowered, problem: Problem) -> list[LayoutAndReason]:
    """Return the layout of each operand, then of each output. This runs for every problem."""
    extents, by_name, infos = problem.extents, dict(problem.operands), dict(problem.outputs)
    dtypes = dict(problem.dtypes)
    if work.printed:
        dtypes.update(work.printed)
    found = [_load(each, by_name.get(each.load.name), extents) for each in work.reads]
    for each in work.writes:
        name = each.output.name
        found.append(_store(each, dtypes[name], infos.get(name), extents))
    return found


def _load(read: Read, info: OperandInfo | None, extents: Extents) -> LayoutAndReason:
    load, axes, ways, along = read
    if not isinstance(info, TensorInfo):
        return Layout("number"), ""
    found = seen(info, load)
    if found is None:
        return None, ""
    if len(ways) == 1 and not WAYS[ways[0]].in_place:
        return Layout(ways[0], info.dtype, inner=_inner(found.strides, along, extents)), ""
    size, where = info.dtype.itemsize, modes(found.strides, along, extents)
    layout, why = _first(ways, info.dtype, Lying(where, axes, size, found.is_aligned(info, size), False))
    return layout, why if len(ways) > 1 else "values take other columns of it"


def _store(write: Write, dtype: torch.dtype, info: TensorInfo | None, extents: Extents) -> LayoutAndReason:
    output, _, ways, along = write
    found = written(output, info, extents)
    if len(ways) == 1:
        return Layout(ways[0], dtype, inner=_inner(found.strides, along, extents)), ""
    aligned, axes = found.is_aligned(info, dtype.itemsize), _varying(write, extents)
    return _first(ways, dtype, Lying(modes(found.strides, along, extents), axes, dtype.itemsize, aligned, True))


def _varying(write: Write, extents: Extents) -> frozenset[str]:
    """The axes that an output varies over. L is one of them for a direct output of a single batch, so that the same
    kernel also serves batched problems."""
    return write.axes | {"l"} if WAYS[write.ways[-1]].in_place and extents["l"] == 1 else write.axes


def _first(ways: tuple[str, ...], dtype: torch.dtype, lying: Lying) -> LayoutAndReason:
    """Return the layout in the first way that does not refuse the tensor, and why the way before it refused."""
    where, why = lying.where, ""
    pairs = lying.aligned and _in_pairs(where)
    for name in ways:
        way = WAYS[name]
        refused = way.refuses(lying) if way.refuses is not None else None
        if refused is None:
            break
        why = refused
    if way.staged:
        return Layout(name, dtype, where.strides[1] == 1, pairs, where.inner, repeats(lying)), ""
    if lying.leaves and way is WAYS["direct"] and _is_by_rows(lying):
        name = "coalesced"
    return Layout(name, dtype, True, pairs, where.inner, alike=1 if lying.leaves else _alike(where)), why


def _is_by_rows(lying: Lying) -> bool:
    """Whether a tensor varies over M and N, has contiguous rows that no reshape cut, and elements of 16 or 32 bits."""
    where = lying.where
    return {"m", "n"} <= lying.axes and not any(where.inner) and where.strides[1] == 1 and lying.size in (2, 4)


def _in_pairs(where: Modes) -> bool:
    """Whether columns 2j and 2j + 1 of every row are contiguous and start at an even element of the tensor."""
    extents, strides, inner = where
    first = len(inner[0]) + 1  # the first of the pieces of N
    if strides[first] != 1 or extents[first] % 2:
        return False
    return not any(step % 2 for i, step in enumerate(strides) if extents[i] > 1 and i != first)


def _alike(where: Modes) -> int:
    """How many neighbouring columns always have the same element."""
    first = len(where.inner[0]) + 1  # of the pieces of N
    return where.extents[first] if where.inner[1] and where.strides[first] == 0 else 1


def _inner(strides: Strides, along: Along, extents: Extents) -> Inner:
    return UNCUT if along.at is not None else modes(strides, along, extents).inner
