"""GPU time of forward and backward of one layer with an epilogue, for each way to compute the epilogue's derivative.

    python benchmarks/derivatives.py --save results.json [--shapes 4096x16384x4096] [--rounds 15] [--of gelu rotary]

`recompute` computes the product again, with the derivative as its epilogue. `preactivation` stores accum, and one
launch reads it. `by operations` stores accum, and single operations of PyTorch read it. `auto` is the library's choice
between the first two. All are compared with torch.compile of the same lines. The ways of a shape are interleaved.
`gibibytes` is the peak memory of each way beyond the memory in use before. Gradients are computed for the input, the
weight and all float operands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from gpu_timing import Backlog, beside, measured, parser_of, told
from torch.nn import functional as F

import epifuse as ef
from epifuse.pytorch import traffic

SHAPES = "4096x16384x4096,4096x4096x4096,8192x8192x1024"
COMPILED, OPERATIONS = "torch.compile", "by operations"
SAVED = ("auto", "recompute", "preactivation")
HEAD, EPS = 128, 1e-6
Shape = tuple[int, int, int]


def gelu(accum: Any, bias: Any) -> Any:
    """The bias and activation of the first layer of an MLP."""
    return F.gelu(accum + bias, approximate="tanh")


def swiglu(accum: Any) -> Any:
    """SwiGLU of a gate and an up projection whose columns lie one after the other."""
    gate, up = accum.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary(accum: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding of heads, which rotates the two halves of each head."""
    heads = accum.unflatten(-1, (-1, HEAD))
    x, y = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat((-y, x), dim=-1) * sin).flatten(-2)


def normed_rotary(accum: Any, weight: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding by halves of heads to which RMSNorm was applied first."""
    heads = accum.unflatten(-1, (-1, HEAD))
    normed = heads * torch.rsqrt((heads * heads).mean(dim=-1, keepdim=True) + EPS) * weight
    x, y = normed.chunk(2, dim=-1)
    return (normed * cos + torch.cat((-y, x), dim=-1) * sin).flatten(-2)


def projection(accum: Any, cos: Any, sin: Any) -> Any:
    """Queries, keys and values of different widths; values are not rotated. No single launch computes the whole
    derivative."""
    width = accum.shape[-1] // 4
    q, k, v = accum.split((2 * width, width, width), dim=-1)
    q_rotated, k_rotated = rotary(q, cos, sin), rotary(k, cos, sin)
    return q_rotated, k_rotated, v


def rotary_of_pairs(accum: Any, cos_of_pair: Any, sin_of_pair: Any) -> Any:
    """Rotary embedding of heads, which rotates neighbouring columns. The two columns of a pair share an angle."""
    pairs = accum.unflatten(-1, (-1, HEAD // 2, 2))
    x, y = pairs.unbind(dim=-1)
    turned = torch.stack((x * cos_of_pair - y * sin_of_pair, x * sin_of_pair + y * cos_of_pair), dim=-1)
    return turned.flatten(-3)


def gated_heads(accum: Any, gate: Any) -> Any:
    """A gate for each row and head, which all columns of the head share."""
    return (accum.unflatten(-1, (-1, HEAD)) * torch.sigmoid(gate)).flatten(-2)


def scaled(accum: Any, scale: Any, residual: Any) -> Any:
    """A layer scale and a residual."""
    return accum * scale + residual


def operands(function: Callable[..., Any], m: int, n: int) -> dict[str, torch.Tensor]:
    """The operands that `function` has parameters for, in bfloat16. Sines and cosines need no gradient."""
    made = {"device": "cuda", "dtype": torch.bfloat16}
    angles = torch.rand(m, 1, HEAD, **made)
    known = {
        "cos": angles.cos(),
        "sin": angles.sin(),
        "cos_of_pair": angles[..., : HEAD // 2].cos(),
        "sin_of_pair": angles[..., : HEAD // 2].sin(),
        "gate": torch.randn(m, n // HEAD, 1, **made, requires_grad=True),
        "bias": torch.randn(n, **made, requires_grad=True),
        "scale": torch.rand(n, **made, requires_grad=True),
        "residual": torch.randn(m, n, **made, requires_grad=True),
        "weight": torch.rand(HEAD, **made, requires_grad=True),
    }
    return {name: known[name] for name in function.__code__.co_varnames[1 : function.__code__.co_argcount]}


FUNCTIONS = (gelu, swiglu, rotary, normed_rotary, rotary_of_pairs, gated_heads, scaled, projection)
EPILOGUES = {each.__name__: each for each in FUNCTIONS}


def measure(shape: Shape, function: Callable[..., Any], rounds: int, backlog: Backlog) -> dict[str, Any]:
    """Measure each way beside torch.compile. Return one row of the results."""
    m, n, k = shape
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16().requires_grad_()
    given = operands(function, m, n)
    leaves = [x, w, *(value for value in given.values() if value.requires_grad)]

    def plain() -> Any:
        return function(F.linear(x, w), **given)

    def fused(save: str, fallback: str | None = None) -> Any:
        return ef.linear(x, w, epilogue=function, operands=given, save=save, fallback=fallback)

    torch.compiler.reset()  # forget what was compiled for other epilogues
    made = plain()
    arriving = [torch.randn_like(output) for output in (made if isinstance(made, tuple) else (made,))]
    compiled = torch.compile(plain, dynamic=False)
    forwards = {COMPILED: compiled, **{save: partial(fused, save) for save in SAVED}}
    forwards[OPERATIONS] = partial(fused, "preactivation", "torch")  # another fallback, so that nothing is shared
    calls = {name: partial(_gradients, forward, leaves, arriving) for name, forward in forwards.items()}
    with patch.object(traffic, "_MOST_TRAFFIC", 0.0):  # no launch moves so little, so operations are taken
        calls[OPERATIONS]()
    peaks = {name: round(_peak(call), 3) for name, call in calls.items()}
    return {
        "shape": shape, "epilogue": function.__name__, "gibibytes": peaks, **beside(calls, COMPILED, rounds, backlog)
    }  # fmt: skip


def _gradients(forward: Callable[[], Any], leaves: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]) -> Any:
    return torch.autograd.grad(forward(), leaves, arriving)


def _peak(call: Callable[[], Any]) -> float:
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save. Return the exit status."""
    parser = parser_of(__doc__, SHAPES)
    parser.add_argument("--of", nargs="+", choices=EPILOGUES, default=[*EPILOGUES])
    options = parser.parse_args(argv)
    places = [(shape, EPILOGUES[name]) for shape in options.shapes for name in options.of]
    return measured(options, places, measure, lambda row: f"{row['shape']} {row['epilogue']}: {told(row)}")


if __name__ == "__main__":
    sys.exit(main())
