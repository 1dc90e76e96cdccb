"""Outputs that nobody allocates: reductions are float32 whatever A is, those of segments too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import epifuse as ef

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "rows": lambda accum: accum.amax(-1),
    "heads": lambda accum: accum.unflatten(-1, (4, 64)).amax(-1),
    "logarithms of heads": lambda accum: accum.unflatten(-1, (4, 64)).logsumexp(-1),
    "across heads": lambda accum: accum.unflatten(-1, (4, 64)).amax(-2),
    "groups of rows": lambda accum: accum.unflatten(0, (4, 16)).sum(1),
    "what is made of such": lambda accum: accum.unflatten(-1, (4, 64)).mean(-1) * 2 + 1,
    "scales of blocks": lambda accum: ef.block_scale(ef.absmax(accum.unflatten(-1, (2, 128)), dim=-1, keepdim=True)),
}
WHOLE: dict[str, Callable[..., Any]] = {
    "softmax of heads": lambda accum: accum.unflatten(-1, (4, 64)).softmax(-1),
    "beside a reduction": lambda accum: accum.unflatten(-1, (4, 64)) - accum.unflatten(-1, (4, 64)).amax(-1, True),
    "a half": lambda accum: accum.chunk(2, -1)[0],
}


def dtype_of(function: Callable[..., Any], dtype: torch.dtype) -> torch.dtype:
    return ef.gemm(torch.randn(64, 32, dtype=dtype), torch.randn(32, 256, dtype=dtype), epilogue=function).dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_are_wide(name: str, dtype: torch.dtype) -> None:
    assert dtype_of(REDUCTIONS[name], dtype) == torch.float32


@pytest.mark.parametrize("name", WHOLE)
def test_others_are_as_a(name: str) -> None:
    assert dtype_of(WHOLE[name], torch.bfloat16) == torch.bfloat16
