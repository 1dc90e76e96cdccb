"""Compare the GPU time of gated products with the plain product of all columns, cuBLAS, torch.compile and QuACK.

    python benchmarks/gated.py --save results.json [--shapes 4096x28672x4096] [--rounds 15]

N counts the columns of gate and up. `SwiGLU` is silu(gate) * up of a stacked weight. The others are functions of gate
and up, and orders of their columns, for which nothing was tuned. All of a shape are interleaved in one run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gpu_timing import Backlog, beside, measured, parser_of, that_run, told
from torch.nn import functional as F

import epifuse as ef

SHAPES = "8192x8192x8192,4096x28672x4096,4096x4096x4096,16384x8192x1024,8192x8192x512,64x28672x4096"
PLAIN = "plain"
Shape = tuple[int, int, int]


def plain(accum):
    """The product alone, with all columns."""
    D = accum
    return D


def swiglu(accum):
    """SwiGLU of the two halves of a stacked weight."""
    gate, up = accum.chunk(2, dim=-1)
    D = F.silu(gate) * up
    return D


def swiglu_preact(accum):
    """SwiGLU that also stores the pre-activations, which the backward reads."""
    gate, up = accum.chunk(2, dim=-1)
    D = F.silu(gate) * up
    P = accum
    return D, P


def biased_geglu(accum, bias):
    """GEGLU with a bias of both halves, and with up + 1."""
    gate, up = (accum + bias).chunk(2, dim=-1)
    D = F.gelu(gate, approximate="tanh") * (up + 1)
    return D


def clamped(accum):
    """A gate of interleaved columns, clamped, with a sigmoid of 1.702 times the gate."""
    gate, up = accum[..., 0::2].clamp(max=7.0), accum[..., 1::2].clamp(-7.0, 7.0)
    D = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return D


EPILOGUES: Mapping[str, Callable[..., Any]] = {
    PLAIN: plain,
    "SwiGLU": swiglu,
    "SwiGLU, pre-activations": swiglu_preact,
    "GEGLU, bias, up + 1": biased_geglu,
    "clamped, interleaved": clamped,
}


def ours(name: str, a: torch.Tensor, b: torch.Tensor) -> Callable[[], Any]:
    """A bound launch of the best kernel."""
    (m, _), n = a.shape, b.shape[1]
    wide, half = (torch.empty(m, width, dtype=a.dtype, device=a.device) for width in (n, n // 2))
    given: dict[str, torch.Tensor] = {"D": wide if name == PLAIN else half}
    if name.endswith("pre-activations"):
        given["P"] = wide
    if "bias" in name:
        given["bias"] = torch.randn(n, device=a.device).to(a.dtype)
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(EPILOGUES[name], given))
    kernel = ef.get_kernels(args)[0]
    print(f"  {name}: {kernel.plan.spec.name}", flush=True)
    return kernel.bind(args)


def peers(a: torch.Tensor, b: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Calls of other libraries, by name. QuACK takes the columns of its weight interleaved."""
    wide, half = (torch.empty(a.shape[0], n, dtype=a.dtype, device=a.device) for n in (b.shape[1], b.shape[1] // 2))
    torch._dynamo.reset()  # torch.compile compiles a function for eight shapes, from the second on with symbols
    compiled = torch.compile(lambda a, b: swiglu(a @ b), dynamic=False)
    found: dict[str, Callable[[], Any]] = {
        "cuBLAS": lambda: torch.mm(a, b, out=wide),
        "torch.compile": lambda: compiled(a, b),
    }
    try:
        from quack.gemm_interface import gemm_gated
    except ImportError:
        return found
    options = {"activation": "swiglu", "postact_out": half, "tuned": False}
    found["QuACK"] = lambda: gemm_gated(a, b, store_preact=False, **options)
    found["QuACK, pre-activations"] = lambda: gemm_gated(a, b, preact_out=wide, **options)
    return found


def measure(shape: Shape, rounds: int, backlog: Backlog) -> dict[str, Any]:
    """Measure one shape: microseconds, and ratios to the plain product with their 95 % intervals."""
    m, n, k = shape
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16().t()
    calls = {name: ours(name, a, b) for name in EPILOGUES} | that_run(peers(a, b))
    return {"shape": list(shape), **beside(calls, PLAIN, rounds, backlog)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    options = parser_of(__doc__, SHAPES).parse_args(argv)
    return measured(
        options, zip(options.shapes), measure, lambda row: f"{'x'.join(map(str, row['shape']))}: {told(row)}"
    )


if __name__ == "__main__":
    sys.exit(main())
