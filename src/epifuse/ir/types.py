"""What a value is: a kind, and the axes it varies over. Symbolic: no extents but those the user's reshape wrote.

A GEMM has three axes: l (batch), m (rows of A), n (columns of B). `reshape` may factor an axis, n = (h, 64);
a `Factor` is one such piece. A *region*, a range of columns that is not one of several equal parts, is an axis of its
own: its factors have extents, and count from its first column. A *dim* is one dimension of a tensor as the user sees
it: a tuple of factors, outermost first, empty where the extent is one. `permute` reorders dims and `reshape` regroups
factors; neither moves data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from epifuse.base.dtypes import Kind

RANK: dict[str, int] = {"mask": 0, "int32": 1, "int64": 2, "int": 3, "float": 4}
"""Promotion takes the higher one, as torch's categories do."""

INT32 = range(-(1 << 31), 1 << 31)

AXES = ("l", "m", "n")


class Factor(NamedTuple):
    """The part of `axis` with the given `stride` (in elements along the axis); `extent` None means: the rest of it."""

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
        """The axis, or the one that it is a region of."""
        return self.axis[0]

    def size(self, extents: Mapping[str, int]) -> int:
        """Its extent in a problem with these axis extents."""
        return extents[self.axis] // self.stride if self.extent is None else self.extent


LAST = 1 << 62
"""Where a range ends that was written without its end."""

Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]


def dim_size(dim: Dim, extents: Mapping[str, int]) -> int:
    """Number of elements along one dim."""
    size = 1
    for axis, stride, extent in dim:  # as `Factor.size`, without a call
        size *= extents[axis] // stride if extent is None else extent
    return size


def shape_of(dims: Dims, extents: Mapping[str, int]) -> tuple[int, ...]:
    """The shape the user sees."""
    return tuple([dim_size(dim, extents) for dim in dims])


def counted(dims: Dims, extents: Mapping[str, int]) -> Dims:
    """The same dims where N has another extent: its factors have those of these extents."""
    return tuple(tuple(f._replace(extent=f.size(extents)) if f.axis == "n" else f for f in dim) for dim in dims)


def factors_of(dims: Iterable[Dim]) -> tuple[Factor, ...]:
    """Every factor in the dims, in canonical order: l, m, n, and the outer factor of an axis first."""
    return canonical(factor for dim in dims for factor in dim)


def canonical(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    """Sorted, without repeats."""
    return tuple(sorted(set(factors), key=lambda f: (AXES.index(f.axis[0]), f.axis, -f.stride)))


def region(start: int, stop: int) -> str:
    """The axis of these columns."""
    return f"n[{start}:{stop}]"


def columns_of(axis: str, extents: Mapping[str, int]) -> tuple[int, int]:
    """Which columns a region has, or N itself."""
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
        """The axes it varies over, a region being a part of n."""
        return frozenset(factor.axis[0] for factor in self.factors)


def regions_of(factors: Iterable[Factor]) -> list[str]:
    """The regions of N that they are parts of, such as `0:512`."""
    return sorted({factor.axis[2:-1] for factor in factors if factor.axis != factor.along})


def promote(kinds: Iterable[Kind]) -> Kind:
    """The kind torch's category promotion gives."""
    return max(kinds, key=RANK.__getitem__)
