"""Which way each operand and output could travel, as it lies in memory. Imports no cutlass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from epifuse.ir import Factor
from epifuse.providers.cutedsl.addresses import Modes, modes, strides_of, strides_written
from epifuse.providers.cutedsl.lowering import Lowered, Read, Write
from epifuse.providers.cutedsl.program import Access
from epifuse.request.problem import OperandInfo, Problem, TensorInfo

ALIGNMENT = 16  # bytes: TMA's rule for strides and bases
_WIDEST_STAGED = 4  # bytes: the copies in the accumulator's order are for elements of 8, 16 and 32 bits
Extents = Mapping[str, int]
Factors = tuple[Factor, ...]
Inner = tuple[tuple[int, ...], ...]


class Sides(NamedTuple):
    """How each operand and each output could travel in any design, in the order of the graph's loads and outputs.

    None for an operand that is reshaped in a way that would move its data.
    """

    loads: tuple[Access | None, ...]
    stores: tuple[Access, ...]


def sides(work: Lowered, problem: Problem) -> Sides:
    """As shapes, strides and dtypes of this problem decide."""
    extents, by_name, infos = problem.extents, problem.by_name, dict(problem.outputs)
    dtypes = {**dict(problem.dtypes), **work.printed}
    loads = [_load(each, by_name.get(each.load.name), work.factors, extents) for each in work.reads]
    stores = [
        _store(each, dtypes[each.output.name], infos.get(each.output.name), work.factors, extents)
        for each in work.writes
    ]
    return Sides(tuple(loads), tuple(stores))


def _load(read: Read, info: OperandInfo | None, factors: Factors, extents: Extents) -> Access | None:
    load, axes, way = read
    if not isinstance(info, TensorInfo):
        return Access(load.name, "number")
    strides = strides_of(info, load)
    if strides is None:
        return None
    where = modes(strides, load.dims or (), factors, extents)
    if way is not None:
        return Access(load.name, way, axes, info.dtype, inner=_inner(where))
    return _tile(load.name, axes, info.dtype, where, _not_by_tma, aligned=info.aligned)


def _store(write: Write, dtype: torch.dtype, info: TensorInfo | None, factors: Factors, extents: Extents) -> Access:
    output, axes, way = write
    where = modes(strides_written(output, info, extents), output.dims or (), factors, extents)
    if way is not None:
        return Access(output.name, way, axes, dtype, inner=_inner(where))
    # One batch is written as if it varied over batches: the same kernel then serves batched problems.
    axes = axes | {"l"} if extents["l"] == 1 else axes
    return _tile(output.name, axes, dtype, where, _not_written_by_tma, aligned=info is None or info.aligned)


_Rule = Callable[[Modes, frozenset[str], int], str | None]


def _tile(
    name: str, axes: frozenset[str], dtype: torch.dtype, where: Modes, refused: _Rule, *, aligned: bool
) -> Access:
    """By TMA where it can address the tensor, else direct."""
    size, inner = dtype.itemsize, _inner(where)
    why = _unstaged(where, inner, axes, size, aligned=aligned) or refused(where, axes, size)
    by_rows, pairs = why is not None or where[1].strides[0] == 1, aligned and _in_pairs(where)
    return Access(name, "direct" if why else "tile", axes, dtype, by_rows, pairs, why or "", inner)


def _unstaged(where: Modes, inner: Inner, axes: frozenset[str], size: int, *, aligned: bool) -> str | None:
    """Why a tensor cannot go through shared memory in tiles, or None."""
    if size > _WIDEST_STAGED:
        return f"its values have {8 * size} bits"
    if any(inner):
        return "no single stride steps along M, N or the batches"
    if not ("m" in axes and "n" in axes):
        return "it does not vary over both M and N"
    if not aligned:
        return f"it does not start at a multiple of {ALIGNMENT} bytes"
    if 1 not in (where[0].strides[0], where[1].strides[0]):
        return "neither its rows nor its columns are contiguous"
    return None


def _not_written_by_tma(where: Modes, axes: frozenset[str], size: int) -> str | None:
    # TMA writes whole granules of 16 bytes: a result of one float32 was written with what lies behind it.
    inner = where[1] if where[1].strides[0] == 1 else where[0]
    line = size * inner.extents[0]
    if line % ALIGNMENT:
        return f"its contiguous lines of {line} bytes are no multiple of {ALIGNMENT}"
    return _not_by_tma(where, axes, size)


def _not_by_tma(where: Modes, axes: frozenset[str], size: int) -> str | None:
    """Why TMA cannot address a tensor that is contiguous along M or N, or None."""
    m, n, l = where
    across = m if n.strides[0] == 1 else n
    steps = [across] if "l" not in axes else [across, l]
    strides = [size * mode.strides[0] for mode in steps if mode.extents[0] > 1]
    if 0 in strides:
        return "it is expanded: hand in what it was expanded from"
    for stride in strides:
        if stride < 0 or stride % ALIGNMENT:
            return f"a stride of {stride} bytes is no multiple of {ALIGNMENT}"
    return None


def _in_pairs(where: Modes) -> bool:
    """Whether two neighbouring columns always lie beside each other, from an even place on."""
    m, n, l = where
    if n.strides[0] != 1 or n.extents[0] % 2:
        return False
    others = [step for mode in (m, l) for extent, step in zip(*mode, strict=True) if extent > 1]
    return math.gcd(*n.strides[1:], *others) % 2 == 0


def _inner(where: Modes) -> Inner:
    m, n, l = where
    return m.extents[:-1], n.extents[:-1], l.extents[:-1]
