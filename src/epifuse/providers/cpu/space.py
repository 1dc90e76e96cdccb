"""The iteration space on the CPU: every value is a strided view with one dimension a factor, l before m before n."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from epifuse.ir import Dims, Factor, Graph, Load
from epifuse.ir.types import AXES, canonical, factors_of

Index = tuple[slice, ...]


class Tile(NamedTuple):
    """Half-open ranges of the three axes."""

    l: tuple[int, int]
    m: tuple[int, int]
    n: tuple[int, int]


class Placement(NamedTuple):
    """How a tensor lies in a space: for each dimension which stride of the tensor it takes, and how many times.

    `own` where the tensor is such a view already.
    """

    shape: tuple[int, ...]
    picks: tuple[tuple[int, int], ...]
    own: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as a view over the space."""
        if self.own:
            return tensor
        strides = tensor.stride()
        return tensor.as_strided(self.shape, [strides[i] * times if times else 0 for i, times in self.picks])


@dataclass(frozen=True)
class Space:
    """Factors in canonical order, and the extents of the axes."""

    factors: tuple[Factor, ...]
    extents: Mapping[str, int]

    @staticmethod
    def of(graph: Graph, extents: Mapping[str, int], axes: Iterable[str] = AXES) -> Space:
        """The finest factors that occur, and every one of these axes at least once."""
        found = {factor for type_ in graph.types.values() for factor in type_.factors}
        found |= {factor for output in graph.outputs for factor in factors_of(output.dims or ())}
        missing = {Factor(axis) for axis in axes if not any(factor.axis == axis for factor in found)}
        return Space(canonical(found | missing), extents)

    def of_extents(self, extents: Mapping[str, int]) -> Space:
        """The same factors in a problem of other extents."""
        return Space(self.factors, extents)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes it has, in order: problems without batches may leave out l."""
        return tuple(dict.fromkeys(factor.axis for factor in self.factors))

    @cached_property
    def inner(self) -> dict[str, int]:
        """Elements of each axis in one step of its outermost factor: tiles start at multiples of it."""
        return {axis: max((f.stride for f in self.factors if f.axis == axis), default=1) for axis in AXES}

    @cached_property
    def outer(self) -> tuple[tuple[str, bool], ...]:
        """For each dimension: its axis, and whether it is the axis' outermost factor, the one tiles cut."""
        return tuple((f.axis, f.stride == self.inner[f.axis]) for f in self.factors)

    def shape(self, factors: Iterable[Factor], tile: Tile | None = None) -> tuple[int, ...]:
        """Shape of a value that varies over `factors`: whole, or one tile of it."""
        present = set(factors)
        return tuple([self._size(f, tile) if f in present else 1 for f in self.factors])

    def _size(self, factor: Factor, tile: Tile | None) -> int:
        if tile is None or factor.stride != self.inner[factor.axis]:
            return factor.size(self.extents)
        start, stop = getattr(tile, factor.axis)
        return int((stop - start) // factor.stride)

    def view(self, tensor: torch.Tensor, dims: Dims) -> torch.Tensor:
        """`tensor`, whose dims are `dims`, as a view over the space: stride 0 where it does not vary."""
        return self.placement(dims).of(tensor)

    def placement(self, dims: Dims) -> Placement:
        """How tensors of these dims lie in the space."""
        picks: dict[Factor, tuple[int, int]] = {}
        for position, dim in enumerate(dims):
            step = 1
            for factor in reversed(dim):
                picks[factor] = position, step
                step *= factor.size(self.extents)
        own = dims == tuple([(factor,) for factor in self.factors])
        return Placement(self.shape(picks), tuple([picks.get(factor, (0, 0)) for factor in self.factors]), own)

    def index(self, tile: Tile, shape: Iterable[int]) -> Index:
        """Slices that cut a whole value of this shape down to the tile."""
        cuts = []
        for (axis, cut), size in zip(self.outer, shape, strict=True):
            start, stop = getattr(tile, axis)
            step = self.inner[axis]
            cuts.append(slice(start // step, stop // step) if cut and size != 1 else slice(None))
        return tuple(cuts)

    def dimensions(self, factors: Iterable[Factor]) -> list[int]:
        """Positions of these factors."""
        wanted = set(factors)
        return [position for position, factor in enumerate(self.factors) if factor in wanted]


def viewed(tensor: torch.Tensor, load: Load) -> torch.Tensor:
    """The operand after the layout operations written on it; they move no data."""
    for op, argument in load.views:
        if op == "permute":
            tensor = tensor.permute(argument)
        elif op == "unsqueeze":
            tensor = tensor.unsqueeze(argument)
        else:
            tensor = tensor.view(argument)
    return tensor


def tiles(space: Space, rows: int, columns: int) -> Iterator[Tile]:
    """Tiles of the result, columns outermost so that a block of B stays in cache; several batches where M is small."""
    l, m, n = (space.extents[axis] for axis in AXES)
    if 0 in (l, m, n):
        return
    step = space.inner["l"]
    batches = max(rows // m // step, 1) * step
    for n0 in range(0, n, columns):
        for l0 in range(0, l, batches):
            for m0 in range(0, m, min(rows, m)):
                yield Tile((l0, min(l0 + batches, l)), (m0, min(m0 + rows, m)), (n0, min(n0 + columns, n)))
