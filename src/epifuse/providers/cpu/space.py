"""The iteration space on the CPU: every value is a strided view with one dimension a factor, in the order l, m, n."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from epifuse.base.lazy import cached_property
from epifuse.ir import Dims, Factor, Graph, Load, Node, Type
from epifuse.ir.types import AXES, Dim, canonical, columns_of, dim_size, factors_of

Index = tuple[slice, ...]


class Tile(NamedTuple):
    """Half-open ranges of the three axes."""

    l: tuple[int, int]
    m: tuple[int, int]
    n: tuple[int, int]

    @property
    def is_empty(self) -> bool:
        """Whether it has no batch."""
        return self.l[0] == self.l[1]


Mask = tuple[bool, ...]
"""For each dimension of a space, whether a value varies along it. Empty for a number, which has no dims."""


class Placement(NamedTuple):
    """How a tensor lies in a space. `picks` has a pair for each dimension of the space: the dim of the tensor whose
    stride it takes, and how many times (0 if the tensor does not vary along it).

    `own` is set if the tensor is such a view already.
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


class Placing(NamedTuple):
    """How tensors of some dims lie in a space of any extents: see `Placement`.

    If a dim of the tensor has several factors, `over` has for each factor those behind it, over which its stride steps.
    """

    mask: Mask
    picks: tuple[tuple[int, int], ...]
    over: tuple[Dim, ...]
    own: bool

    def within(self, space: Space) -> Placement:
        """The placement in `space`, with its extents."""
        picks = self.picks
        if self.own:
            return Placement(space.sizes, picks, True)
        if any(self.over):
            extents = space.extents
            picks = tuple([(at, times * dim_size(o, extents)) for (at, times), o in zip(picks, self.over, strict=True)])
        return Placement(space.masked(self.mask), picks, self.own)


@dataclass(frozen=True)
class Space:
    """Factors in canonical order, and the extents of the axes."""

    factors: tuple[Factor, ...]
    extents: Mapping[str, int]

    @staticmethod
    def of(graph: Graph, extents: Mapping[str, int], axes: Iterable[str] = AXES) -> Space:
        """The space of all factors that occur in `graph`. It has each of the `axes` at least once."""
        found = {factor for type_ in graph.types.values() for factor in type_.factors}
        found |= {factor for output in graph.outputs for factor in factors_of(output.dims or ())}
        missing = {Factor(axis) for axis in axes if not any(factor.axis == axis for factor in found)}
        return Space(canonical(found | missing), extents)

    def of_extents(self, extents: Mapping[str, int]) -> Space:
        """The same factors in a problem of other extents."""
        made = Space(self.factors, extents)
        sizes = tuple([factor.size(extents) for factor in self.factors])
        vars(made).update(axes=self.axes, inner=self.inner, outer=self.outer, sizes=sizes)  # only the sizes change
        return made

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes of the space, in order. Problems without batches may leave out l."""
        return tuple(dict.fromkeys(factor.axis for factor in self.factors))

    @cached_property
    def inner(self) -> dict[str, int]:
        """For each axis the stride of its outermost factor, in elements. Tiles start at multiples of it."""
        return {axis: max((f.stride for f in self.factors if f.axis == axis), default=1) for axis in AXES}

    @cached_property
    def outer(self) -> tuple[tuple[str, bool], ...]:
        """For each dimension its axis, and whether it is the outermost factor of that axis, which tiles cut."""
        return tuple((f.axis, f.stride == self.inner[f.axis]) for f in self.factors)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Extents of the dimensions."""
        return tuple([factor.size(self.extents) for factor in self.factors])

    def mask(self, factors: Iterable[Factor]) -> Mask:
        """The mask of a value that varies over `factors`."""
        present = set(factors)
        return tuple([factor in present for factor in self.factors])

    def masked(self, mask: Mask) -> tuple[int, ...]:
        """The shape of a whole value that has this mask."""
        if False not in mask:
            return self.sizes if mask else ()
        return tuple([size if varies else 1 for varies, size in zip(mask, self.sizes, strict=True)])

    def shape(self, factors: Iterable[Factor], tile: Tile) -> tuple[int, ...]:
        """Shape of one tile of a value that varies over `factors`."""
        present = set(factors)
        return tuple([self._size(f, tile) if f in present else 1 for f in self.factors])

    def _size(self, factor: Factor, tile: Tile) -> int:
        if factor.stride != self.inner[factor.axis]:
            return factor.size(self.extents)
        start, stop = getattr(tile, factor.axis)
        return int((stop - start) // factor.stride)

    def view(self, tensor: torch.Tensor, dims: Dims) -> torch.Tensor:
        """`tensor`, whose dims are `dims`, as a view over the space: stride 0 where it does not vary."""
        return self.placing(dims).within(self).of(tensor)

    def placing(self, dims: Dims) -> Placing:
        """How tensors of these dims lie in the space, whatever its extents."""
        at = {factor: (position, 1) for position, dim in enumerate(dims) for factor in dim}
        over = {factor: dim[i + 1 :] for dim in dims for i, factor in enumerate(dim)}
        return Placing(
            self.mask(at),
            tuple([at.get(factor, (0, 0)) for factor in self.factors]),
            tuple([over.get(factor, ()) for factor in self.factors]),
            dims == tuple([(factor,) for factor in self.factors]),
        )

    def refined(self, dims: Dims) -> Dims:
        """Dims of whole axes, such as those of accum, with the factors into which the space divides the axes."""
        return tuple(tuple(f for f in self.factors if f.axis in {factor.axis for factor in dim}) for dim in dims)

    def index(self, tile: Tile, shape: Iterable[int]) -> Index:
        """Slices that cut a whole value of this shape down to the tile."""
        cuts = []
        for (axis, cut), size in zip(self.outer, shape, strict=True):
            start, stop = getattr(tile, axis)
            step = self.inner[axis]
            cuts.append(slice(start // step, stop // step) if cut and size != 1 else slice(None))
        return tuple(cuts)

    def places(self, gone: Iterable[tuple[Factor, int]]) -> list[tuple[int, int]]:
        """Pairs of a dimension, counted from the end (-1 is the last), and the place that is picked along it."""
        at = dict(gone)
        return [(i - len(self.factors), at[factor]) for i, factor in enumerate(self.factors) if factor in at]

    def dimensions(self, factors: Iterable[Factor]) -> list[int]:
        """Positions of these factors."""
        wanted = set(factors)
        return [position for position, factor in enumerate(self.factors) if factor in wanted]


def picked(x: torch.Tensor, places: Iterable[tuple[int, int]]) -> torch.Tensor:
    """x at one place along some dims. It keeps these dims, with one element. Dims are counted from the end."""
    for dim, place in places:
        if x.dim() >= -dim and x.shape[dim] != 1:
            x = x.narrow(dim, place, 1)
    return x


def columns(x: torch.Tensor, space: Space, node: Node, types: Mapping[Node, Type]) -> torch.Tensor:
    """The columns of x that belong to the region of `node`, in the region's own factors."""
    (arg,), (start, stop) = node.args, node.attr
    # A region of one column has no factor of its own.
    of, into = (next((f.axis for f in types[at].factors if f.along == "n"), None) for at in (arg, node))
    assert of is not None, "a region is of columns"
    first, _ = columns_of(of, space.extents)
    before = sum(factor.along != "n" for factor in space.factors)
    shape = x.shape[:before]
    own = x.flatten(before).narrow(-1, start - first, stop - start)
    return own.reshape(*shape, *(f.size(space.extents) if f.axis == into else 1 for f in space.factors[before:]))


def cut(x: torch.Tensor, dim: int, start: int, stop: int, step: int, drops: bool) -> torch.Tensor:
    """A range of elements along one dim of x, or if it `drops` the dim one element; see `passes.parts.Part`."""
    return x.select(dim, start) if drops else torch.ops.aten.slice(x, dim, start, stop, step)


def viewed(tensor: torch.Tensor, load: Load, reshape: Callable[..., torch.Tensor] = torch.Tensor.view) -> torch.Tensor:
    """The operand after the layout operations written on it. Raises `RuntimeError` if `view` would have to copy it."""
    for op, argument in load.views:
        if op == "permute":
            tensor = tensor.permute(argument)
        elif op == "unsqueeze":
            tensor = tensor.unsqueeze(argument)
        elif op == "part":
            tensor = cut(tensor, *argument)
        else:
            tensor = reshape(tensor, argument)
    return tensor


def is_one_tile(space: Space, rows: int, columns: int) -> bool:
    """Whether one tile holds the whole result."""
    extents = space.extents
    l, m, n = extents["l"], extents["m"], extents["n"]
    return 0 not in (l, m, n) and m <= rows and n <= columns and (l == 1 or l <= _batches(space, rows))


def tiles(space: Space, rows: int, columns: int) -> Iterator[Tile]:
    """Yield the tiles of the result. Columns are the outermost loop, so that a block of B stays in cache. A tile has
    several batches if M is small.

    If there are no batches, the tiles are empty: they compute the values that do not vary along batches.
    """
    l, m, n = (space.extents[axis] for axis in AXES)
    if 0 in (m, n):
        return
    batches = _batches(space, rows)
    for n0 in range(0, n, columns):
        for l0 in range(0, max(l, 1), batches):
            for m0 in range(0, m, min(rows, m)):
                yield Tile((l0, min(l0 + batches, l)), (m0, min(m0 + rows, m)), (n0, min(n0 + columns, n)))


def _batches(space: Space, rows: int) -> int:
    """The number of batches of a tile."""
    step = space.inner["l"]
    return max(rows // space.extents["m"] // step, 1) * step
