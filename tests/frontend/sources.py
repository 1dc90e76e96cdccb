"""Functions made from text, and the comparison with PyTorch that every test of the front end ends in."""

import itertools
import linecache
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.testing._comparison import default_tolerances

import epifuse as ef

_count = itertools.count()
M, N, K = 6, 10, 4


def function_from(text: str, /, *, file: str = "", **names: Any) -> Callable[..., Any]:
    """The last function that `text` defines, with a source that `inspect` finds."""
    file = file or f"<source {next(_count)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"torch": torch, "F": F, "math": math, "ef": ef, "__name__": "user", **names}
    before = set(namespace)
    exec(compile(text, file, "exec"), namespace)
    made = [namespace[name] for name in namespace if name not in before and name != "__builtins__"]
    return made[-1]


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(M, K), torch.randn(K, N)


def compare(function: Callable[..., Any], /, **named: Any) -> Any:
    """Run `function` fused and as plain PyTorch on the same accumulator; return the fused result."""
    A, B = operands()
    fused = ef.gemm(A, B, epilogue=function, **named)
    plain = ef.reference(function)(A @ B, **named)
    check(fused, plain)
    return fused


_COARSER = {torch.float32: torch.float16, torch.float64: torch.float32}


def check(fused: Any, plain: Any) -> None:
    """Equal up to rounding: the functions here are wrong or right, not nearly right, so torch's own bounds serve."""
    pairs = zip(fused, plain, strict=True) if isinstance(plain, (tuple, list)) else [(fused, plain)]
    for ours, theirs in pairs:
        if not isinstance(theirs, torch.Tensor):  # a conditional chose the number: it broadcasts
            theirs = torch.full(ours.shape, theirs)
        assert ours.shape == theirs.shape
        if not theirs.is_floating_point():
            assert torch.equal(ours, theirs.to(ours.dtype))
            continue
        rtol, atol = default_tolerances(_COARSER.get(theirs.dtype, torch.bfloat16))
        wide = ours.to(torch.float64), theirs.to(torch.float64)
        torch.testing.assert_close(*wide, rtol=rtol, atol=atol, equal_nan=True)
