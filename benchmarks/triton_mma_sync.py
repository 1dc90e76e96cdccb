"""A product by Triton that uses mma.sync on Hopper, to compare what another compiler reaches with that instruction.

Triton uses wgmma on Hopper unless `DISABLE_MMA_V3` is set before it compiles. The tiles are those that Triton's own
tutorials and templates try. A short measurement chooses the fastest.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch

os.environ["DISABLE_MMA_V3"] = "1"

import triton
import triton.language as tl

_TILES = ((128, 128, 32), (128, 128, 64), (128, 256, 32), (256, 128, 32), (128, 256, 64), (256, 128, 64), (64, 256, 32))
_CONFIGS = tuple(itertools.product(_TILES, (4, 8), (3, 4)))
_BAND = 8


@triton.jit
def _kernel(a, b, d, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr):
    """D = A @ B.T for contiguous A (M, K), B (N, K) and D (M, N), whose extents are multiples of the tile's."""
    turn, across_m, across_n = tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = turn // (BAND * across_n) * BAND
    height = min(across_m - first, BAND)
    m = first + turn % (BAND * across_n) % height
    n = turn % (BAND * across_n) // height
    rows, columns, along = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN), tl.arange(0, BK)
    of_a, of_b = a + rows[:, None] * K + along[None, :], b + columns[None, :] * K + along[:, None]
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, K, BK):
        sums = tl.dot(tl.load(of_a), tl.load(of_b), sums)
        of_a += BK
        of_b += BK
    tl.store(d + rows[:, None] * N + columns[None, :], sums.to(tl.bfloat16))


def peer(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
    """The fastest launch of `out` = `a` @ `b`. All are bfloat16, and `b` is the transpose of a contiguous matrix.

    Raises `RuntimeError` if Triton uses another instruction, or if no tile divides the shape, and `AssertionError` if
    the result differs from cuBLAS's.
    """
    (m, k), n = a.shape, b.shape[1]
    calls = []
    for (bm, bn, bk), warps, stages in _CONFIGS:
        if m % bm or n % bn or k % bk:
            continue
        grid = (m // bm * (n // bn),)

        def call(
            grid: tuple[int] = grid, tile: tuple[int, int, int] = (bm, bn, bk), warps: int = warps, stages: int = stages
        ) -> Any:
            return _kernel[grid](a, b.T, out, m, n, k, *tile, _BAND, num_warps=warps, num_stages=stages)

        try:
            ptx = call().asm["ptx"]
        except triton.runtime.errors.OutOfResources:
            continue
        if "wgmma" in ptx or "mma.sync" not in ptx:
            raise RuntimeError("Triton multiplies by another instruction than mma.sync")
        calls.append(call)
    if not calls:
        raise RuntimeError(f"none of Triton's tiles divides {m} x {n} x {k}")
    fastest = min(calls, key=lambda call: triton.testing.do_bench(call, warmup=5, rep=20))
    fastest()
    torch.testing.assert_close(out, a @ b, rtol=1e-2, atol=1e-2)
    return fastest
