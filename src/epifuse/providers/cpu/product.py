"""The product of one panel: rows of A times columns of B, in the accumulator's dtype."""

from __future__ import annotations

import torch

from epifuse.providers.cpu import mkl

PANEL_ROWS = 4096
"""Rows of a product that is written straight to its destination. torch's GEMM packs B anew for each call: with 1024
rows M = N = 4096, K = 256 took 1.14 of the time of one call, more than the accumulator's way through memory costs. A
product of bfloat16 matrices is so fast that the way through memory costs more."""


def prepare(a: torch.Tensor, b: torch.Tensor, accumulator: torch.dtype) -> torch.Tensor:
    """B in the dtype the product runs in: once a launch, K x N elements."""
    if a.dtype == b.dtype == torch.bfloat16 and mkl.bfloat16_product() is not None:
        return b
    return b.to(torch.float64 if accumulator == torch.float64 else torch.float32)


def evenly_spaced(matrices: torch.Tensor) -> bool:
    """True if the rows of all batches lie at one distance, so that they flatten into one matrix without a copy."""
    return matrices.shape[0] == 1 or matrices.stride(0) == matrices.shape[1] * matrices.stride(1)


def multiply(a: torch.Tensor, b: torch.Tensor, accum: torch.Tensor, integers: int | None) -> None:
    """accum = a @ b for 2-D a and accum; `b` is prepared. `integers` is the largest product of two integer elements."""
    if b.dtype == torch.bfloat16:
        mkl.multiply(a, b, accum)
        return
    a = a.to(b.dtype)
    if integers is None:
        if accum.dtype == b.dtype:
            torch.mm(a, b, out=accum)
        else:
            accum.copy_(torch.mm(a, b))
        return
    # float32 adds integers exactly below 2**24: a chunk of K that stays below is exact, and chunks add up in int32.
    chunk = max((1 << 24) // max(integers, 1), 1)
    accum.zero_()
    for start in range(0, a.shape[1], chunk):
        accum += torch.mm(a[:, start : start + chunk], b[start : start + chunk]).to(torch.int32)


def largest_product(a: torch.dtype, b: torch.dtype) -> int | None:
    """The largest |x * y| of two integer dtypes; None for floats."""
    if a.is_floating_point:
        return None
    return max(abs(v) for v in _limits(a)) * max(abs(v) for v in _limits(b))


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    limits = torch.iinfo(dtype)
    return limits.min, limits.max
