"""Where the elements of operands and outputs lie: an extent and a stride for each of M, N, L, or several.

Integer arithmetic on shapes and strides: this is done for every problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from epifuse.ir import Dims, Factor, Load, Output
from epifuse.ir.types import AXES, shape_of
from epifuse.request.problem import TensorInfo, dense

Strides = tuple[int, ...]


class Mode(NamedTuple):
    """How M, N or L of a tensor is walked: extents and strides of its pieces, fastest first.

    One piece, unless a reshape cut the axis and no single stride steps over the cut.
    """

    extents: tuple[int, ...]
    strides: tuple[int, ...]


Modes = tuple[Mode, Mode, Mode]


def modes(strides: Strides, dims: Dims, factors: Sequence[Factor], extents: Mapping[str, int]) -> Modes:
    """M, N and L of a tensor whose dims are `dims`; the stride is 0 where it does not vary."""
    own: dict[Factor, int] = {}
    for dim, stride in zip(dims, strides, strict=True):
        for factor in reversed(dim):
            own[factor] = stride
            stride *= factor.size(extents)
    if len(factors) == len(AXES):  # no axis is cut
        l, m, n = (Mode((factor.size(extents),), (own.get(factor, 0),)) for factor in factors)
        return m, n, l
    pieces: dict[str, list[tuple[int, int]]] = {"m": [], "n": [], "l": []}
    for factor in reversed(factors):
        known, extent, stride = pieces[factor.axis], factor.size(extents), own.get(factor, 0)
        if known and known[-1][0] == 1:
            known.pop()
        if known and (extent == 1 or stride == known[-1][0] * known[-1][1]):
            known[-1] = known[-1][0] * extent, known[-1][1]
        else:
            known.append((extent, stride))
    m, n, l = (Mode(*zip(*found, strict=True)) for found in pieces.values())
    return m, n, l


def strides_of(operand: TensorInfo, load: Load) -> Strides | None:
    """The strides after the layout operations written on an operand; None where one would move its data."""
    shape, strides = operand.shape, operand.strides
    for op, argument in load.views:
        if op == "permute":
            shape, strides = tuple(shape[i] for i in argument), tuple(strides[i] for i in argument)
        elif op == "unsqueeze":
            at = argument % (len(shape) + 1)
            stride = shape[at] * strides[at] if at < len(shape) else 1
            shape, strides = (*shape[:at], 1, *shape[at:]), (*strides[:at], stride, *strides[at:])
        else:
            viewed = _viewed(shape, strides, argument)
            if viewed is None:
                return None
            shape, strides = tuple(viewed.shape), viewed.stride()
    return strides


def strides_written(output: Output, given: TensorInfo | None, extents: Mapping[str, int]) -> Strides:
    """The strides of an output; one that was given may have the shape that keeps dims, one that was not is dense."""
    shape = shape_of(output.dims or (), extents)
    if given is None:
        return dense(shape)
    if given.shape == shape and 1 not in shape:
        return given.strides
    viewed = _viewed(given.shape, given.strides, shape)
    assert viewed is not None, "destinations were checked"
    return viewed.stride()


def _viewed(shape: tuple[int, ...], strides: Strides, wanted: tuple[int, ...]) -> torch.Tensor | None:
    """By PyTorch's own rule, on a tensor without data: rarely needed, and not worth a second rule."""
    try:
        return torch.empty_strided(shape, strides, device="meta").view(wanted)
    except RuntimeError:
        return None
