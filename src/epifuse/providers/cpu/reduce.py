"""Reductions across tiles. Partial results merge in the order of the tiles, sums in float64, so that every run has the
same result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from epifuse.fusion.reduction import REDUCTIONS, Merge, along, prod


def in_tile(name: str, dims: Sequence[int], x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """The complete reduction of a tile that holds all values it needs. Reduced dims are kept, with extent 1."""
    return out.copy_(along(name, x, dims))


class Accumulator:
    """Keeps the running value of one reduction over all tiles, in tensors of `dtypes`. The first tensor is the value.

    The value of a logsumexp is a sum relative to the largest input so far, which is in a second tensor. `count` is how
    many values each result combines.
    """

    def __init__(self, name: str, kind: str, compute: torch.dtype) -> None:
        self.name, self.merge = name, REDUCTIONS[name].merge
        self.dtypes: tuple[torch.dtype, ...]
        match self.merge.how:
            case "sum" | "product":
                self.dtypes = (torch.int64 if kind == "int64" else torch.float64,)
            case "any" | "all":
                self.dtypes = (torch.bool,)
            case "exponentials":
                self.dtypes = (torch.float64, compute)
            case "largest" | "smallest":
                self.dtypes = (compute if kind == "float" else torch.int64 if kind == "int64" else torch.int32,)

    def start(self, count: int, value: torch.Tensor, *largest: torch.Tensor) -> None:
        """Set the tensors to the reduction of no values."""
        value.fill_(_identity(self.merge, self.dtypes[0], count))
        for tensor in largest:
            tensor.fill_(-torch.inf)

    def add(self, dims: list[int], x: torch.Tensor, value: torch.Tensor, *largest: torch.Tensor) -> None:
        """Merge one tile of `x` into the running value. `dims` are the reduced dims."""
        if self.merge.how == "exponentials":
            _add_exponentials(x, dims, value, *largest)
        else:
            _MERGE[self.name](value, x, dims)

    def result(self, count: int, value: torch.Tensor, *largest: torch.Tensor, out: torch.Tensor) -> None:
        """Write the finished reduction to `out`, which has the dtype of its kind."""
        if self.name == "mean":
            value = value / count
        elif self.name == "norm":
            value = torch.sqrt(value)
        for most in largest:
            finite = torch.where(torch.isfinite(most), most, 0.0)
            value = torch.where(most == torch.inf, torch.inf, torch.log(value) + finite)
        out.copy_(value)


def _identity(merge: Merge, dtype: torch.dtype, count: int) -> float | int:
    if merge.how == "exponentials":
        return 0
    # In torch the absolute value of the least integer is that integer, so the neutral 0 of absmax would be too large.
    bounded = merge.how in ("largest", "smallest") and not dtype.is_floating_point
    if not bounded or (count == 0 and merge.neutral == 0):
        return merge.neutral
    return torch.iinfo(dtype).max if merge.how == "smallest" else torch.iinfo(dtype).min


def _add_sum(value: torch.Tensor, x: torch.Tensor, dims: list[int]) -> None:
    value += torch.sum(x, dims, keepdim=True, dtype=torch.int64 if value.dtype == torch.int64 else None)


def _add_squares(value: torch.Tensor, x: torch.Tensor, dims: list[int]) -> None:
    wide = x.to(torch.int64) if value.dtype == torch.int64 else x
    value += torch.sum(wide * wide, dims, keepdim=True)


def _multiply(value: torch.Tensor, x: torch.Tensor, dims: list[int]) -> None:
    value *= prod(x.to(value.dtype), tuple(dims), True)


def _merge_with(
    combine: Callable[..., torch.Tensor], reduce: Callable[..., torch.Tensor]
) -> Callable[[torch.Tensor, torch.Tensor, list[int]], None]:
    def merge(value: torch.Tensor, x: torch.Tensor, dims: list[int]) -> None:
        combine(value, reduce(x, dims, keepdim=True), out=value)

    return merge


def _absmax(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    return torch.amax(torch.abs(x), dims, keepdim=keepdim)


_MERGE: dict[str, Callable[[torch.Tensor, torch.Tensor, list[int]], None]] = {
    "sum": _add_sum,
    "mean": _add_sum,
    "sum_of_squares": _add_squares,
    "norm": _add_squares,
    "prod": _multiply,
    "amax": _merge_with(torch.maximum, torch.amax),
    "amin": _merge_with(torch.minimum, torch.amin),
    "absmax": _merge_with(torch.maximum, _absmax),
    "any": _merge_with(torch.logical_or, lambda x, dims, keepdim: torch.any(x, dims, keepdim=keepdim)),
    "all": _merge_with(torch.logical_and, lambda x, dims, keepdim: torch.all(x, dims, keepdim=keepdim)),
}


def _add_exponentials(x: torch.Tensor, dims: list[int], value: torch.Tensor, largest: torch.Tensor) -> None:
    """Online logsumexp: `value` is the sum of exp(x - largest) so far. Infinities do not turn into NaN."""
    new = torch.maximum(largest, torch.amax(x, dims, keepdim=True))
    shift = torch.where(torch.isfinite(new), new, 0.0)
    value *= torch.exp(torch.where(torch.isfinite(largest), largest - shift, -torch.inf)).to(value.dtype)
    value += torch.sum(torch.exp(x - shift), dims, keepdim=True)
    # NaN in x makes `new`, and with it every later sum, NaN. +inf makes the sum inf, and its logarithm is inf too.
    largest.copy_(new)
