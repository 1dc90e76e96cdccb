"""The product of one panel: rows of A times columns of B, in the accumulator's dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from epifuse.base.dtypes import multiplied_as
from epifuse.providers.cpu import mkl
from epifuse.request.scaled import dequantised

PANEL_ROWS = 4096
"""Rows of each GEMM call if the product is written straight to its destination. torch's GEMM packs B again in each
call: with calls of 1024 rows, M = N = 4096, K = 256 took 1.14 times as long as one call. That costs more than the
accumulator's way through memory. The product of bfloat16 matrices is so fast that the way through memory costs more."""


def operand_dtype(a: torch.dtype, b: torch.dtype, accumulator: torch.dtype) -> torch.dtype:
    """The dtype that B must have for the product of matrices of dtypes `a` and `b`. A is converted panel by panel."""
    if multiplied_as(a, b) == a == torch.bfloat16 and mkl.bfloat16_product() is not None:
        return a
    return torch.float64 if accumulator == torch.float64 else torch.float32


def evenly_spaced(matrices: torch.Tensor) -> bool:
    """Whether all rows of all batches lie at the same distance, so that they flatten into one matrix without a copy."""
    return matrices.shape[0] == 1 or matrices.stride(0) == matrices.shape[1] * matrices.stride(1)


def call(a: torch.Tensor, b: torch.Tensor, accum: torch.Tensor, integers: int | None) -> Callable[[], Any]:
    """A function that does the same as `multiply` with these arguments, by `torch.mm` alone if that is enough."""
    if integers is None and a.dtype == b.dtype == accum.dtype:
        return partial(torch.mm, a, b, out=accum)
    return partial(multiply, a, b, accum, integers)


def multiply(a: torch.Tensor, b: torch.Tensor, accum: torch.Tensor, integers: int | None) -> None:
    """accum = a @ b for 2-D a and accum; `b` has its `operand_dtype`.

    `integers` is the largest product of two integer elements, or None for floats.
    """
    if b.dtype == torch.bfloat16:
        mkl.multiply(a, b, accum)
        return
    a = a.to(b.dtype)
    if integers is None:
        if accum.dtype == b.dtype:
            torch.mm(a, b, out=accum)
        else:
            accum.copy_(exact(a, b))
        return
    # float32 adds integers exactly below 2**24: a chunk of K that stays below is exact, and chunks add up in int32.
    chunk = max((1 << 24) // max(integers, 1), 1)
    accum.zero_()
    for start in range(0, a.shape[1], chunk):
        accum += exact(a[:, start : start + chunk], b[start : start + chunk]).to(torch.int32)


def dequantise(
    a: torch.Tensor, b: torch.Tensor, scales: Mapping[Any, Any], to: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Write A and B in float32 to the two tensors `to`, each block times its scale. `scales` has the scales by name."""
    for matrix, made in zip(to, dequantised(a, b, scales), strict=True):
        matrix.copy_(made)


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in their own dtype; batches broadcast. Autocast does not change the dtype of an operation with an `out`."""
    return torch.matmul(a, b, out=a.new_empty(0))
