"""How dims combine: broadcasting, alignment of operands, permute and reshape. Extents serve to check only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod

from epifuse.ir.types import AXES, Dim, Dims, Factor, dim_size, shape_of

Extents = Mapping[str, int]


class DimsError(Exception):
    """Dims that do not combine. `key` and `values` select the sentence in the catalogue; the caller adds the place."""

    def __init__(self, key: str, **values: object) -> None:
        super().__init__(key)
        self.key = key
        self.values = values


def broadcast(all_dims: Sequence[Dims], extents: Extents) -> Dims:
    """The dims that `all_dims` broadcast to. NumPy's rule, right-aligned, but on axes: equal extents along different
    axes do not match. Raises `DimsError`."""
    result: list[Dim] = []
    for position in range(1, max(map(len, all_dims), default=0) + 1):
        here = [dims for dims in all_dims if len(dims) >= position and dims[-position]]
        for other in here[1:]:
            if other[-position] != here[0][-position]:
                left, right = shape_of(here[0], extents), shape_of(other, extents)
                extents_here = {left[-position], right[-position]}
                key = "dims_differ" if len(extents_here) == 1 or 1 in extents_here else "shapes_differ"
                axes = [dims[-position][0].axis for dims in (here[0], other)]
                if left[-position] == right[-position] and all(axis.startswith("n[") for axis in axes):
                    raise DimsError("ranges_differ", ranges=" and ".join(axis[2:-1] for axis in axes))
                raise DimsError(key, left=left, right=right)
        result.append(here[0][-position] if here else ())
    factors = sorted([factor for dim in result for factor in dim], key=lambda factor: (factor.axis, factor.stride))
    if any(one.along == other.along and _conflict(one, other) for one, other in pairwise(factors)):
        # `s[:, None] - s` has an element for each pair of rows, or of a row and a part of one, which no tile holds.
        raise DimsError("dims_differ", left=shape_of(all_dims[0], extents), right=shape_of(all_dims[-1], extents))
    return tuple(reversed(result))


def _conflict(inner: Factor, outer: Factor) -> bool:
    """Whether two factors along one axis cannot be dims of the same value: they overlap, or are of different regions.
    The stride of `outer` is not smaller than that of `inner`."""
    return inner.axis != outer.axis or inner.extent is None or inner.stride * inner.extent > outer.stride


def align(shape: Sequence[int], partner: Dims, accum: Dims, extents: Extents) -> Dims | None:
    """Dims of an operand of this shape beside a value with dims `partner`; None if it does not broadcast.

    In a dim in which the partner does not vary, the operand is aligned with accum.
    """
    result: list[Dim] = []
    for position in range(1, len(shape) + 1):
        want: Dim = partner[-position] if position <= len(partner) else ()
        if not want and position <= len(accum):
            want = accum[-position]
        extent = shape[-position]
        if extent == 1:
            result.append(())
        elif want and extent == dim_size(want, extents):
            result.append(want)
        else:
            return None
    return tuple(reversed(result))


def shape_hint(name: str, shape: tuple[int, ...], accum: tuple[int, ...]) -> str:
    """What the user can write if an operand of this shape does not broadcast to `accum`, a shape of at least 2 dims."""
    *batches, rows, columns = accum
    if len(shape) == 1 and shape[0] == rows:
        return f"a column vector has the shape (M, 1): if {name} has one value a row, write {name}[:, None]"
    if shape == (columns, 1):
        return f"one value a column has the shape (N,): write {name}[:, 0]"
    if len(shape) == 2 and batches and shape[0] == batches[-1] and shape[1] in (rows, columns):
        ways = f"{name}[:, None, :] for one row a batch", f"{name}[:, :, None] for one column a batch"
        return "write " + ", or ".join(
            way for way, extent in zip(ways, (columns, rows), strict=True) if extent == shape[1]
        )
    column = (*batches, rows, 1)
    if batches and shape in ((prod(column),), (prod(column), 1)):
        return f"one value a row has the shape {column}: write {name}.reshape{column}"
    further = [(*batches, 1, 1), (*batches, 1, columns), column] if batches else []
    shapes = ", ".join(map(str, [(columns,), (rows, 1), *further]))
    return f"operands broadcast by NumPy's rule: a number, {shapes} or {accum}"


_MOST_DIMS = 64  # torch's own limit


def normalise(dim: int, rank: int) -> int:
    """`dim` counted from the front. Raises `DimsError` if there is no such dim."""
    if rank > _MOST_DIMS:
        raise DimsError("too_many_dims", most=_MOST_DIMS)
    if not -rank <= dim < rank:
        raise DimsError("dim_range", dim=dim, range=f"{-rank} to {rank - 1}" if rank else "empty for a number")
    return dim % rank


def permuted(dims: Sequence[int], rank: int) -> tuple[int, ...]:
    """The permutation with negative dims counted from the front."""
    order = tuple(dim % rank if rank and -rank <= dim < rank else dim for dim in dims)
    if sorted(order) != list(range(rank)):
        raise DimsError("permute_dims", dims=tuple(dims), rank=rank)
    return order


def transposed(pair: Sequence[int] | None, shape: Sequence[int]) -> tuple[int, ...]:
    """The permutation that exchanges the two dims of `pair`. None means `x.T`, which takes at most two dims."""
    order = list(range(len(shape)))
    if pair is None:
        if len(shape) > 2:
            raise DimsError("transpose_rank", shape=tuple(shape))
        return tuple(reversed(order))
    first, second = (normalise(dim, len(shape)) for dim in pair)
    order[first], order[second] = second, first
    return tuple(order)


def rearranged(how: str, numbers: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The shape after flatten(start, end), unflatten(dim, sizes) or squeeze(dim)."""
    at = normalise(numbers[0], len(shape))
    if how == "flatten":
        end = normalise(numbers[1], len(shape))
        if end < at:
            raise DimsError("flatten_order", start=at, end=end)
        return (*shape[:at], prod(shape[at : end + 1]), *shape[end + 1 :])
    if how == "squeeze":
        return tuple(extent for dim, extent in enumerate(shape) if dim != at or extent != 1)
    return (*shape[:at], *resolve_shape(numbers[1:], shape[at : at + 1]), *shape[at + 1 :])


def resolve_shape(want: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """`want` with its -1 filled in, as a new shape for a tensor of `shape`. Raises `DimsError` if it does not fit."""
    if len(want) > _MOST_DIMS:
        raise DimsError("too_many_dims", most=_MOST_DIMS)
    size = prod(shape)
    known = prod(extent for extent in want if extent != -1)
    holes = [position for position, extent in enumerate(want) if extent == -1]
    told = {"shape": tuple(shape), "want": tuple(want)}
    if len(holes) > 1 or any(extent < -1 for extent in want) or (holes and (known == 0 or size % known)):
        raise DimsError("reshape_size", **told)
    filled = tuple(size // known if extent == -1 else extent for extent in want)
    if prod(filled) != size:
        raise DimsError("reshape_size", **told)
    return filled


def regroup(dims: Dims, want: Sequence[int], extents: Extents) -> Dims:
    """`dims` with their factors split and merged to the extents `want`. Raises if an extent cuts across factors."""
    shape = shape_of(dims, extents)
    if tuple(want) == shape:
        return dims
    pool = [factor for dim in dims for factor in dim if factor.size(extents) != 1]
    result: list[Dim] = []
    for extent in reversed(want):
        taken: list[Factor] = []
        while extent != 1:
            if not pool:
                raise DimsError("reshape_split", shape=shape, want=tuple(want))
            factor = pool.pop()
            size = factor.size(extents)
            if size == extent or (size and extent % size == 0):
                taken.append(factor)
                extent = 1 if size == extent else extent // size
            elif extent and size % extent == 0:
                taken.append(Factor(factor.axis, factor.stride, extent))
                outer = None if factor.extent is None else factor.extent // extent
                pool.append(Factor(factor.axis, factor.stride * extent, outer))
                extent = 1
            else:
                raise DimsError("reshape_split", shape=shape, want=tuple(want))
        result.append(joined(reversed(taken)))
    if pool:  # a shape without elements does not say to which dim the remaining factors belong
        raise DimsError("reshape_split", shape=shape, want=tuple(want))
    return tuple(reversed(result))


def joined(factors: Iterable[Factor]) -> Dim:
    """The factors, with adjacent pieces of an axis merged: a dim that was split and merged then equals the original."""
    result: list[Factor] = []
    for inner in factors:
        if result and inner.extent is not None and result[-1][:2] == (inner.axis, inner.stride * inner.extent):
            extent = None if result[-1].extent is None else result[-1].extent * inner.extent
            result[-1] = Factor(inner.axis, inner.stride, extent)
        else:
            result.append(inner)
    return tuple(result)


def refine(factors: Sequence[Factor]) -> dict[str, tuple[int, ...]]:
    """The strides at which the factors cut each axis, 1 first. Raises unless each of them divides the next one."""
    cuts: dict[str, set[int]] = {axis: {1} for axis in AXES}
    for factor in factors:
        cuts.setdefault(factor.axis, {1}).add(factor.stride)
        if factor.extent is not None:
            cuts[factor.axis].add(factor.stride * factor.extent)
    for axis, strides in cuts.items():
        ordered = sorted(strides)
        for inner, outer in pairwise(ordered):
            if outer % inner:
                raise DimsError("factors_differ", axis=axis, first=inner, second=outer)
    return {axis: tuple(sorted(strides)) for axis, strides in cuts.items()}


def expand(dim: Dim, cuts: Mapping[str, tuple[int, ...]]) -> Dim:
    """`dim` in the finest factors into which `cuts` (from `refine`) split each axis, outermost first."""
    result: list[Factor] = []
    for factor in dim:
        strides = [s for s in cuts[factor.axis] if s >= factor.stride]
        if factor.extent is not None:
            strides = [s for s in strides if s < factor.stride * factor.extent]
        for stride in reversed(strides):
            following = [s for s in cuts[factor.axis] if s > stride]
            result.append(Factor(factor.axis, stride, following[0] // stride if following else None))
    return tuple(result)
