"""Where the elements of operands and outputs lie: an extent and a stride for each of M, N, L, or several."""

from __future__ import annotations

from typing import NamedTuple

import torch

from epifuse.ir import Dims
from epifuse.providers.cpu.space import Space


class Mode(NamedTuple):
    """How M, N or L of a tensor is walked: extents and strides of its pieces, fastest first.

    One piece, unless a reshape cut the axis and no single stride steps over the cut.
    """

    extents: tuple[int, ...]
    strides: tuple[int, ...]


def modes(tensor: torch.Tensor, dims: Dims, space: Space) -> tuple[Mode, Mode, Mode]:
    """M, N and L of a tensor whose dims are `dims`; the stride is 0 where it does not vary."""
    strides = space.view(tensor, dims).stride()
    pieces: dict[str, list[tuple[int, int]]] = {axis: [] for axis in "mnl"}
    for factor, stride in zip(reversed(space.factors), reversed(strides), strict=True):
        known, extent = pieces[factor.axis], factor.size(space.extents)
        if known and known[-1][0] == 1:
            known.pop()
        if known and (extent == 1 or stride == known[-1][0] * known[-1][1]):
            known[-1] = known[-1][0] * extent, known[-1][1]
        else:
            known.append((extent, stride))
    m, n, l = (Mode(*zip(*pieces[axis], strict=True)) for axis in "mnl")
    return m, n, l
