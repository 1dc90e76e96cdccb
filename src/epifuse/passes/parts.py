"""Parts of a dim: each is a place along a factor of the dim's axis, or a region of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from epifuse.ir import Dims, Factor
from epifuse.ir.types import LAST, columns_of, dim_size, region, shape_of
from epifuse.passes.dims import DimsError, Extents, regroup

Picked = tuple[tuple[Factor, int], ...]
"""The factors that a part no longer varies over, each with the place along it at which the part lies."""


_FEW_PARTS = 8  # the most parts for which a hint writes out all sizes


class Part(NamedTuple):
    """The elements range(start, stop, step) of a dim; with `drops` one element, and the dim is dropped."""

    start: int
    stop: int
    step: int = 1
    drops: bool = False

    @property
    def size(self) -> int:
        """The number of elements."""
        return len(range(self.start, self.stop, self.step))


def part_of(how: str, numbers: tuple[int, ...], size: int) -> Part:
    """The part of a dim of `size` elements that a written `part` node means by `how` and `numbers`, or `DimsError`."""
    if how == "element":
        at, count = numbers
        if not -size <= at < size or count not in (0, size):
            wrong = _uneven(size, f"{count} elements", f"there are {size} to unpack")
            raise DimsError("item_range", place=at, have=size) if not count else wrong
        return Part(at % size, at % size + 1, drops=True)
    if how == "range":
        start, stop, step = slice(*numbers).indices(size)
        if stop <= start:
            first, last = ("" if number is None or number >= LAST else number for number in numbers[:2])
            raise DimsError("part_empty", start=first, stop=last, size=size)
        return Part(start, stop, step)
    *pieces, at = numbers
    told = "parts of " + " and ".join(map(str, pieces))
    if min(pieces[: 1 if how == "split" else None]) < 1:
        raise _uneven(size, told, "sizes and counts are positive")
    if how == "chunk":
        (count,) = pieces
        if size % count:
            raise _uneven(size, f"{count} parts", _by_sizes(size, -(-size // count)))
        return Part(at * (size // count), (at + 1) * (size // count))
    if how == "split":
        (width, at), count = pieces, at
        have = size // width
        if size % width or count not in (0, have):
            told = f"{count} parts of {width}" if count else f"parts of {width}"
            raise _uneven(size, told, _by_sizes(size, width))
        if not -have <= at < have:
            raise DimsError("item_range", place=at, have=have)
        return Part(at % have * width, (at % have + 1) * width)
    if sum(pieces) != size:
        raise _uneven(size, told, f"the sizes add up to {size}")
    return Part(sum(pieces[:at]), sum(pieces[: at + 1]))


def _uneven(size: int, parts: str, hint: str) -> DimsError:
    return DimsError("parts_uneven", size=size, parts=parts, hint=hint)


def _by_sizes(size: int, width: int) -> str:
    """A hint for parts of `width` elements. PyTorch makes the last one smaller; here different sizes must be named."""
    count, left = divmod(size, width)
    if not left:
        return f"there are {count} parts of {width}"
    if count > _FEW_PARTS:
        return f"all parts have one size, which divides {size}"
    sizes = ", ".join(map(str, [width] * count + [left]))
    return (
        f"to combine the parts, pad N so that they have one size; otherwise name the sizes: x.split([{sizes}], dim=-1)"
    )


def picked(dims: Dims, at: int, part: Part, extents: Extents) -> tuple[Dims, Picked]:
    """The dims after a part of the dim `at` is taken, and the places that this picks. Raises `DimsError` for a part
    that is not one of several equal parts.

    A contiguous part is one of several parts of its size. A part with a step is one of `step` interleaved parts.
    """
    shape = list(shape_of(dims, extents))
    size, width = shape[at], part.size
    if width == size == 1 and part.drops:
        return (*dims[:at], *dims[at + 1 :]), ()
    if any(factor.along != "n" for factor in dims[at]):
        raise DimsError("part_axis")
    if width == size and not part.drops:
        return dims, ()
    if part.step == 1 and size % width == 0 and part.start % width == 0:
        pieces, inner, place = (size // width, width), False, part.start // width
    elif size % part.step == 0 and width == size // part.step and part.start < part.step:
        pieces, inner, place = (width, part.step), True, part.start
    else:
        of_columns = [dim for dim in dims if any(factor.along == "n" for factor in dim)]
        raise _unequal(part, size, at - len(dims), is_row=of_columns == [dims[at]])
    cut = regroup(dims, [*shape[:at], *pieces, *shape[at + 1 :]], extents)
    gone, rest = (cut[at + 1], cut[at]) if inner else (cut[at], cut[at + 1])
    left = () if part.drops else (rest,)
    return (*cut[:at], *left, *cut[at + 2 :]), places(gone, place, extents)


def _unequal(part: Part, size: int, dim: int, *, is_row: bool) -> DimsError:
    step = "" if part.step == 1 else f":{part.step}"
    hint = "take a piece as x[..., 64:128] of 256, or every other column, where their number is even, as x[..., 0::2]"
    if part.step == 1:
        count = size // math.gcd(size, part.start, part.stop)
        hint = f"take equal pieces, x.chunk({count}, dim={dim}), compute with each, and join all of them by one "
        hint += "torch.cat" + (", or split the row once, as accum.split([64, 48, 16], dim=-1)" if is_row else "")
    return DimsError("part_unequal", told=f"{part.start}:{part.stop}{step}", size=size, hint=hint)


def do_nest(sizes: Iterable[int]) -> bool:
    """Whether each size divides the next larger one. Only then can all parts be places along factors of one axis."""
    return not any(wide % narrow for narrow, wide in pairwise(sorted(sizes)))


def uneven(
    dims: Dims, at: int, part: Part, extents: Extents, *, nests: bool = True
) -> tuple[Dims, tuple[int, int]] | None:
    """The dims and columns of a part of the dim `at` that is a region, or None if it is none. A region is a range of
    the outermost factor of all columns, and is not one of several equal parts, or does not nest with other parts."""
    size = dim_size(dims[at], extents)
    is_one_of_several = part.size > 0 and size % part.size == 0 and part.start % part.size == 0
    if part.step != 1 or part.drops or part.size in (0, size) or (nests and is_one_of_several):
        return None
    if len(dims[at]) != 1 or dims[at][0].along != "n":
        return None
    (outer,) = dims[at]
    first, last = columns_of(outer.axis, extents)
    along = [factor for dim in dims for factor in dim if factor.along == "n"]
    if math.prod(factor.size(extents) for factor in along) != last - first or outer.stride * size != last - first:
        return None
    columns = first + part.start * outer.stride, first + part.stop * outer.stride
    own = {factor: factor._replace(axis=region(*columns)) for factor in along}
    own[outer] = Factor(region(*columns), outer.stride, part.size)
    return tuple(tuple(own.get(factor, factor) for factor in dim) for dim in dims), columns


def free(dims: Dims, count: int, beside: Iterable[Factor], extents: Extents, known: Iterable[Factor] = ()) -> Factor:
    """A factor of N or of a region with `count` places, over which values with these dims do not vary, to join along.

    It is the first of the factors `known` that is free, so that parts join in the places from which they were taken.
    Else it is preferably the one just outside of the factors `beside`. Raises `DimsError` if there is none.
    """
    beside, known = tuple(beside), tuple(known)
    axis = next((f.axis for dim in (*dims, beside, known) for f in dim if f.along == "n"), "n")
    first, last = columns_of(axis, extents)
    size = last - first
    taken = [(f.stride, f.size(extents)) for dim in dims for f in dim if f.axis == axis and f.size(extents) > 1]
    ends = sorted({1, size, *(stride for stride, _ in taken), *(stride * extent for stride, extent in taken)})
    held = {stride for stride, _ in taken}
    gaps = [(low, high // low) for low, high in pairwise(ends) if low and low not in held]
    for factor in known:
        last = factor.stride * count
        within = any(not (factor.stride % low or low * room % last) for low, room in gaps)
        if within and factor.axis == axis and factor.size(extents) == count:
            return factor
    above = max((f.stride * f.size(extents) for f in beside if f.axis == axis), default=1)
    fitting = [low for low, room in sorted(gaps, key=lambda gap: gap[0] != above) if room % count == 0]
    if not fitting:
        raise DimsError("join_too_wide", count=count, shape=shape_of(dims, extents), size=size)
    return Factor(axis, fitting[0], None if axis == "n" and fitting[0] * count == size else count)


def places(factors: Iterable[Factor], place: int, extents: Extents | None = None) -> Picked:
    """`place` along a dim of these factors, as the place along each factor, outermost first. With `extents` any factor
    may lack an extent, as in permuted dims; without them only the first may."""
    found: list[tuple[Factor, int]] = []
    for factor in reversed(tuple(factors)):
        size = factor.extent if extents is None else factor.size(extents)
        place, own = (0, place) if size is None else divmod(place, size)
        found.append((factor, own))
    return tuple(reversed(found))
