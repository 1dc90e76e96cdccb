"""Where the elements of operands and outputs lie: one extent and one stride, or several, for each of M, N and L.

This runs for every problem, so it is integer arithmetic on shapes and strides alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from epifuse.ir import Dims, Factor, Load, Output
from epifuse.ir.types import AXES, shape_of
from epifuse.request.problem import TensorInfo, dense
from epifuse.request.views import Seen, after

Strides = tuple[int, ...]


Inner = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
UNCUT: Inner = ((), (), ())


class Modes(NamedTuple):
    """Extents and strides, in elements, of a tensor's pieces along M, then N, then L. The fastest piece is first.

    An axis has one piece, unless a reshape cut it and no single stride steps over the cut. `inner` holds for each axis
    the extents of all its pieces but the last.
    """

    extents: tuple[int, ...]
    strides: tuple[int, ...]
    inner: Inner = UNCUT


class Along(NamedTuple):
    """Which dims of a tensor run along M, N and L. `factors` are the finest factors (`ir.types`) of these axes.

    `at` holds the positions of M, N and L among the dims, -1 for an axis over which the tensor does not vary. It is
    None if a reshape cut an axis or merged dims.
    """

    dims: Dims
    factors: Sequence[Factor]
    at: tuple[int, int, int] | None

    @staticmethod
    def of(dims: Dims | None, factors: Sequence[Factor]) -> Along:
        """Find `at` for a tensor with these dims."""
        dims = dims or ()
        if {*factors} != _WHOLE or any(len(dim) > 1 for dim in dims):
            return Along(dims, factors, None)
        at = {dim[0].axis: position for position, dim in enumerate(dims) if dim}
        return Along(dims, factors, (at.get("m", -1), at.get("n", -1), at.get("l", -1)))


_WHOLE = {Factor(axis) for axis in AXES}


def modes(strides: Strides, along: Along, extents: Mapping[str, int]) -> Modes:
    """Return the pieces of a tensor along M, N and L. The stride is 0 along an axis over which it does not vary."""
    dims, factors, at = along
    if at is not None:
        down, right, deep = at
        steps = (
            strides[down] if down >= 0 else 0,
            strides[right] if right >= 0 else 0,
            strides[deep] if deep >= 0 else 0,
        )
        return Modes((extents["m"], extents["n"], extents["l"]), steps)
    own: dict[Factor, int] = {}
    for dim, stride in zip(dims, strides, strict=True):
        for factor in reversed(dim):
            own[factor] = stride
            stride *= factor.size(extents)
    pieces: dict[str, list[tuple[int, int]]] = {"m": [], "n": [], "l": []}
    for factor in reversed(factors):
        known, extent, stride = pieces[factor.axis], factor.size(extents), own.get(factor, 0)
        if known and known[-1][0] == 1:
            known.pop()
        if known and (extent == 1 or stride == known[-1][0] * known[-1][1]):
            known[-1] = known[-1][0] * extent, known[-1][1]
        else:
            known.append((extent, stride))
    every = [piece for found in pieces.values() for piece in found]
    m, n, l = (tuple(extent for extent, _ in found[:-1]) for found in pieces.values())
    return Modes(tuple(extent for extent, _ in every), tuple(stride for _, stride in every), (m, n, l))


def seen(own: TensorInfo, load: Load) -> Seen | None:
    """Return an operand after the epilogue's layout operations on it; None if one of them would move its data."""
    return after(Seen(own.shape, own.strides), load.views)


def allocated(output: Output, dtype: torch.dtype, extents: Mapping[str, int]) -> TensorInfo:
    """The dense tensor that is allocated for an output if the call gives none."""
    shape = _shape(output, extents)
    return TensorInfo(shape, dense(shape), dtype, "")


def _shape(output: Output, extents: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of the tensor that an output is stored in: its own, or that of the whole if the output is a part."""
    return shape_of((output.dims if output.whole is None else output.whole) or (), extents)


def written(output: Output, given: TensorInfo | None, extents: Mapping[str, int]) -> Seen:
    """Return how an output lies. A `given` tensor may have the keepdim shape; one that is allocated is dense."""
    shape = _shape(output, extents)
    if given is None:
        found: Seen | None = Seen(shape, dense(shape))
    elif given.shape == shape and 1 not in shape:
        found = Seen(shape, given.strides)
    else:
        found = after(Seen(given.shape, given.strides), (("reshape", shape),))
    assert found is not None, "destinations were checked"
    part = after(found, output.views)
    assert part is not None, "parts move no data"
    return part
