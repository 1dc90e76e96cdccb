"""The type of a value: its kind, and the axes it varies over. Symbolic: the only extents are those of a user's reshape.

A GEMM has three axes: l (batch), m (rows of A), n (columns of B). `reshape` may split an axis, such as n = (h, 64);
a `Factor` is one piece of a split axis. A *region* is a range of columns that is not one of several equal parts. It is
an axis of its own: its factors have extents, and their places count from the region's first column. A *dim* is one
dimension of a tensor as the user sees it: a tuple of factors, outermost first, which is empty if the extent is one.
`permute` reorders dims and `reshape` regroups factors; neither moves data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from epifuse.base.dtypes import Kind

RANK: dict[str, int] = {"mask": 0, "int32": 1, "int64": 2, "int": 3, "float": 4}
"""The rank of each kind. Promotion takes the highest rank, as PyTorch does with its categories of dtypes."""

INT32 = range(-(1 << 31), 1 << 31)

AXES = ("l", "m", "n")


class Factor(NamedTuple):
    """A piece of `axis`: `extent` places that lie `stride` elements apart along it. Extent None: all that remain."""

    axis: str
    stride: int = 1
    extent: int | None = None

    def __str__(self) -> str:
        if self.stride == 1 and self.extent is None:
            return self.axis
        if self.extent is None:
            return f"{self.axis}/{self.stride}"
        return f"{self.axis}/{self.stride}%{self.extent}" if self.stride > 1 else f"{self.axis}%{self.extent}"

    @property
    def along(self) -> str:
        """The axis of the GEMM: l, m or n. For a region this is n."""
        return self.axis[0]

    def size(self, extents: Mapping[str, int]) -> int:
        """The number of places of the factor in a problem whose axes have these `extents`."""
        return extents[self.axis] // self.stride if self.extent is None else self.extent


LAST = 1 << 62
"""The end of a range that was written without an end, such as `x[3:]`."""

Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]


def dim_size(dim: Dim, extents: Mapping[str, int]) -> int:
    """Number of elements along one dim."""
    size = 1
    for axis, stride, extent in dim:  # the same as `Factor.size`, but without the time of a call
        size *= extents[axis] // stride if extent is None else extent
    return size


def shape_of(dims: Dims, extents: Mapping[str, int]) -> tuple[int, ...]:
    """The shape the user sees."""
    return tuple([dim_size(dim, extents) for dim in dims])


def with_extents_of_n(dims: Dims, extents: Mapping[str, int]) -> Dims:
    """The dims with the extents of all factors of N written out, so that they keep their sizes beside another N."""
    return tuple(tuple(f._replace(extent=f.size(extents)) if f.axis == "n" else f for f in dim) for dim in dims)


def factors_of(dims: Iterable[Dim]) -> tuple[Factor, ...]:
    """Every factor in the dims, in canonical order: l, m, n, and outer factors of an axis before its inner ones."""
    return canonical(factor for dim in dims for factor in dim)


def canonical(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    """The factors in canonical order (see `factors_of`), without repeats."""
    return tuple(sorted(set(factors), key=lambda f: (AXES.index(f.axis[0]), f.axis, -f.stride)))


def region(start: int, stop: int) -> str:
    """The name of the axis that is the region of the columns `start` to `stop` (exclusive), such as `n[0:512]`."""
    return f"n[{start}:{stop}]"


def columns_of(axis: str, extents: Mapping[str, int]) -> tuple[int, int]:
    """The first column of a region, and the column behind its last one. `axis` may also be n itself."""
    if axis == "n":
        return 0, extents["n"]
    start, stop = axis[2:-1].split(":")
    return int(start), int(stop)


def show_dims(dims: Dims) -> str:
    """Text such as `[m, n]` or `[m, n/64, n%64]`."""
    return "[" + ", ".join("*".join(map(str, dim)) or "1" for dim in dims) + "]"


@dataclass(frozen=True)
class Type:
    """Kind and factors of a value; `host` marks a number that lives on the host."""

    kind: Kind
    factors: tuple[Factor, ...] = ()
    host: bool = False

    def __str__(self) -> str:
        return f"host {self.kind}" if self.host else self.kind + "[" + ", ".join(map(str, self.factors)) + "]"

    @property
    def axes(self) -> frozenset[str]:
        """The axes of the GEMM that the value varies over. A region counts as n."""
        return frozenset(factor.axis[0] for factor in self.factors)


def regions_of(factors: Iterable[Factor]) -> list[str]:
    """The regions of N that the factors belong to, sorted, as text such as `0:512`."""
    return sorted({factor.axis[2:-1] for factor in factors if factor.axis != factor.along})


def promote(kinds: Iterable[Kind]) -> Kind:
    """The kind that PyTorch's promotion of dtype categories gives."""
    return max(kinds, key=RANK.__getitem__)
