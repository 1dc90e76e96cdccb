"""Functions that the parser treats in a way of their own: layouts, coordinates, printing, and functions whose meaning
depends on their arguments, as `max(x)` is a reduction and `max(x, y)` an elementwise maximum.

Called on tensors they are plain PyTorch.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from epifuse.fusion.host import probability
from epifuse.fusion.philox import philox_rand
from epifuse.fusion.primitives import Value, clip, maximum, minimum
from epifuse.fusion.reduction import DimArgument, amax, amin


def max(x: Value, y: Value = None, *, dim: DimArgument = None, keepdim: bool = False) -> Value:  # noqa: A001
    """`max(x, y)` is the elementwise maximum; `max(x, dim=..., keepdim=...)` the reduction `amax`."""
    return amax(x, dim=dim, keepdim=keepdim) if y is None else maximum(x, y)


def min(x: Value, y: Value = None, *, dim: DimArgument = None, keepdim: bool = False) -> Value:  # noqa: A001
    """`min(x, y)` is the elementwise minimum; `min(x, dim=..., keepdim=...)` the reduction `amin`."""
    return amin(x, dim=dim, keepdim=keepdim) if y is None else minimum(x, y)


def clamp(x: Value, min: Value = None, max: Value = None) -> Value:  # noqa: A002 - torch's parameter names
    """x limited to [min, max]; either bound may be left out. NaN stays NaN."""
    return maximum(x, min) if max is None else (minimum(x, max) if min is None else clip(x, min, max))


def cast(x: Value, dtype: torch.dtype) -> Value:
    """x rounded to `dtype`, PyTorch's own conversion: towards zero for integers."""
    return x.to(dtype)


def permute(x: Value, dims: tuple[int, ...]) -> Value:
    """The dims of x in another order. Moves no data."""
    return x.permute(dims)


def reshape(x: Value, shape: tuple[int, ...]) -> Value:
    """x with its dims split or merged; one extent may be -1. Moves no data."""
    return x.reshape(shape)


def unsqueeze(x: Value, dim: int) -> Value:
    """x with a dim of extent one at position `dim`."""
    return x.unsqueeze(dim)


def transpose(x: Value, dim0: int, dim1: int) -> Value:
    """x with the two dims exchanged. Moves no data."""
    return x.transpose(dim0, dim1)


def flatten(x: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    """x with the dims from `start_dim` to `end_dim` merged. Moves no data."""
    return x.flatten(start_dim, end_dim)


def unflatten(x: Value, dim: int, sizes: tuple[int, ...]) -> Value:
    """x with one dim split; one of the extents may be -1. Moves no data."""
    return x.unflatten(dim, sizes)


def squeeze(x: Value, dim: int) -> Value:
    """x without the dim `dim`, if it has one element. Moves no data."""
    return x.squeeze(dim)


def chunk(x: Value, chunks: int, dim: int = 0) -> tuple[Value, ...]:
    """x in `chunks` equal parts along `dim`. Moves no data."""
    return x.chunk(chunks, dim)  # type: ignore[no-any-return]  # a tensor's


def split(x: Value, split_size_or_sections: int | tuple[int, ...], dim: int = 0) -> tuple[Value, ...]:
    """x in parts of this size, or of these sizes, along `dim`. Sizes may differ if they divide all columns. Moves no
    data."""
    return x.split(split_size_or_sections, dim)  # type: ignore[no-any-return]  # a tensor's


def unbind(x: Value, dim: int = 0) -> tuple[Value, ...]:
    """The elements of x along `dim`. Moves no data."""
    return x.unbind(dim)  # type: ignore[no-any-return]  # a tensor's


def roll(x: Value, shifts: int, dims: int) -> Value:
    """x with its elements shifted by `shifts` places along a dim; those shifted beyond the end come first. Moves no
    data."""
    return torch.roll(x, shifts, dims)


def cat(tensors: Value, dim: int = 0) -> Value:
    """Values of one shape, concatenated along `dim`."""
    return torch.cat(tensors, dim)


def stack(tensors: Value, dim: int = 0) -> Value:
    """Values of one shape, stacked along a new dim."""
    return torch.stack(tensors, dim)


def full_like(x: Value, fill_value: Value, *, dtype: torch.dtype | None = None) -> Value:
    """A number in the shape of x, and in its dtype unless another is given."""
    return torch.full_like(x, fill_value, dtype=dtype)


def extent(x: Value, dim: DimArgument = None) -> Value:
    """How many elements x has along `dim`, or in all: a number that follows the shapes of a call."""
    dims = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    return math.prod(x.shape[d] for d in dims)


def gather(x: Value, dim: int, index: Value) -> Value:
    """The element of x at the position `index` along `dim`. `index` has the extent 1 along `dim`. The result is 0 where
    the position is outside of x."""
    return torch.gather(x, dim, index)


def index_along(x: Value, dim: int) -> Value:
    """The coordinate along a dim of x, int32, in a shape that broadcasts to x."""
    at = dim % x.dim()
    return torch.arange(x.shape[at], dtype=torch.int32, device=x.device).reshape(-1, *(1,) * (x.dim() - at - 1))


def index_m(x: Value) -> Value:
    """The row coordinate of x, int32, shape (M, 1)."""
    return torch.arange(x.shape[-2], dtype=torch.int32, device=x.device).unsqueeze(-1)


def index_n(x: Value) -> Value:
    """The column coordinate of x, int32, shape (N,)."""
    return torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)


def index_l(x: Value) -> Value:
    """The batch coordinate of x, int32, shape (L, 1, 1); 0 where x has no batch."""
    batches = x.shape[-3] if x.dim() > 2 else 1
    return torch.arange(batches, dtype=torch.int32, device=x.device).reshape(-1, 1, 1)[(...,) if x.dim() > 2 else 0]


def linear_index(x: Value) -> Value:
    """The position of each element of x, counted row by row, int32, shape of x."""
    return torch.arange(x.numel(), dtype=torch.int32, device=x.device).reshape(x.shape)


def dropout(x: Value, p: Value, seed: Value) -> Value:
    """x with each element zero with the probability p in [0, 1), and the others divided by 1 - p.

    `seed` is a signed integer of 64 bits: a number, or a tensor of one element, read at each launch, which never leaves
    the device. p is a number in [0, 1); others are refused. An element is kept where `philox_rand(seed, position)` is
    greater than p, as PyTorch decomposes `native_dropout`; the mask is nowhere stored, and the backward pass draws it
    again. Dtype and shape are those of x; the positions are counted in its shape, row by row.
    """
    p = probability(p)
    return (philox_rand(seed, linear_index(x)) > p) * x * (1.0 / (1.0 - p))


def assume_one_hot(x: Value, dim: int = -1) -> Value:
    """x, of which you know that along `dim` one element is 1 and all others are 0. It is not checked: reductions of
    floats that this makes known, such as the sum along `dim`, are not computed."""
    return x


def debug_print(fmt: str, x: Value) -> None:
    """Print `fmt` with its {} replaced by the tile of x, for small problems only."""
    sys.stdout.write(fmt.format(_printable(x)) + "\n")


def _printable(x: Any) -> Any:
    return x.detach().cpu() if isinstance(x, torch.Tensor) else x
