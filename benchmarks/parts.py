"""GPU time of the backward of a gate and of block scales, beside products that move as many bytes, and QuACK.

    python benchmarks/parts.py --save results.json [--shapes 4096x14336x4096] [--rounds 15]

`backward` is the epilogue of dh = dy @ w2 for SwiGLU. It reads gate and up, together (M, 2 N), and writes their
gradients, (M, 2 N), and h, which the gradient of w2 needs. It is compared with `two and two`, which reads two operands
and writes two outputs of (M, N). `two and three` writes three outputs, and so moves as many bytes as the backward.
`blocks` are gelu with one scale for 128 columns in float32, or for 32 columns as e8m0, and the quotient in fp8. They
are compared with the plain product, and with gelu stored in 16 bits. All of a shape are interleaved in one run.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gpu_timing import Backlog, beside, measured, parser_of, that_run, told
from torch.nn import functional as F

import epifuse as ef

SHAPES = "8192x8192x8192,4096x14336x4096,4096x4096x4096,16384x8192x1024,8192x8192x512"
TWO, THREE, BACKWARD, PLAIN = "two and two", "two and three", "SwiGLU backward", "plain"
Shape = tuple[int, int, int]


def two_and_two(accum, C, E):
    """Two operands and two outputs."""
    D = accum * C
    P = accum * E
    return D, P


def two_and_three(accum, C, E):
    """Two operands and three outputs."""
    D = accum * C
    P = accum * E
    h = accum
    return D, P, h


def swiglu_backward(accum, gate, up):
    """The gradients of gate and up, and SwiGLU's value."""
    s = torch.sigmoid(gate)
    dgate = accum * up * (s * (1 + gate * (1 - s)))
    dup = accum * (gate * s)
    h = gate * s * up
    return dgate, dup, h


def plain(accum):
    """The product alone."""
    D = accum
    return D


def gelu(accum):
    """Gelu, stored in 16 bits."""
    D = F.gelu(accum, approximate="tanh")
    return D


def gelu_blocks(accum):
    """Gelu with a scale for each 128 columns."""
    blocks = F.gelu(accum, approximate="tanh").unflatten(-1, (-1, 128))
    scale = ef.block_scale(ef.absmax(blocks, dim=-1, keepdim=True))
    D = (blocks / scale).flatten(-2, -1)
    return D, scale


def gelu_fine_blocks(accum):
    """Gelu with a power of two as the scale of each 32 columns."""
    blocks = F.gelu(accum, approximate="tanh").unflatten(-1, (-1, 32))
    scale = ef.block_scale(ef.absmax(blocks, dim=-1, keepdim=True), rounding="up")
    D = (blocks / scale).flatten(-2, -1)
    return D, scale


def bound(name: str, function: Callable[..., Any], a: Any, b: Any, given: Any, **options: Any) -> Callable[[], Any]:
    """A launch that writes to existing outputs: those in `given`; the others are allocated, as `out_dtypes` says."""
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(function, given), **options)
    outputs = {name: tensor for name, tensor in args.allocate().items() if name not in given}
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(function, **given, **outputs))
    kernel = ef.get_kernels(args)[0]
    print(f"  {name}: {kernel.plan.spec.name}", flush=True)
    return kernel.bind(args)


def backward(a: torch.Tensor, b: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Calls of the gate's backward, where up lies behind gate, and of QuACK's, which interleaves their columns."""
    m, n = a.shape[0], b.shape[1]
    stacked = torch.randn(m, 2 * n, device=a.device).to(a.dtype)
    gradients, h = torch.empty_like(stacked), torch.empty(m, n, dtype=a.dtype, device=a.device)
    gate, up = stacked.chunk(2, dim=-1)
    dgate, dup = gradients.chunk(2, dim=-1)
    given = {"gate": gate, "up": up, "dgate": dgate, "dup": dup, "h": h}
    found = {
        TWO: bound(TWO, two_and_two, a, b, {"C": gate.contiguous(), "E": up.contiguous()}),
        THREE: bound(THREE, two_and_three, a, b, {"C": gate, "E": up, "D": dgate, "P": dup, "h": h}),
        BACKWARD: bound(BACKWARD, swiglu_backward, a, b, given),
    }
    return found | that_run(_quack(a, b, stacked, gradients, h))


def _quack(a: Any, b: Any, stacked: Any, gradients: Any, h: Any) -> dict[str, Callable[[], Any]]:
    try:
        from quack.gemm_interface import gemm_dgated
    except ImportError:
        return {}
    options = {"dx_out": gradients, "postact_out": h, "activation": "swiglu", "tuned": False}
    return {"QuACK": lambda: gemm_dgated(a, b, stacked, **options)}


def blocks(a: torch.Tensor, b: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Calls of gelu with block scales, and those that they are compared with."""
    quotient = {"D": torch.float8_e4m3fn}
    fine = {**quotient, "scale": torch.float8_e8m0fnu}
    return {
        PLAIN: bound(PLAIN, plain, a, b, {}),
        "gelu": bound("gelu", gelu, a, b, {}),
        "1 x 128, float32": bound("1 x 128", gelu_blocks, a, b, {}, out_dtypes={**quotient, "scale": torch.float32}),
        "1 x 32, e8m0": bound("1 x 32", gelu_fine_blocks, a, b, {}, out_dtypes=fine),
    }


OF: Mapping[str, tuple[Callable[..., dict[str, Callable[[], Any]]], str]] = {
    "backward": (backward, TWO),
    "blocks": (blocks, PLAIN),
}


def measure(shape: Shape, name: str, rounds: int, backlog: Backlog) -> dict[str, Any]:
    """Measure one shape: microseconds, and ratios to the base call with their 95 % intervals."""
    m, n, k = shape
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16().t()
    made, base = OF[name]
    return {"of": name, "shape": [*shape], **beside(made(a, b), base, rounds, backlog)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    parser = parser_of(__doc__, SHAPES)
    parser.add_argument("--of", nargs="+", choices=OF, default=[*OF])
    options = parser.parse_args(argv)
    return measured(
        options,
        itertools.product(options.shapes, options.of),
        measure,
        lambda row: f"{'x'.join(map(str, row['shape']))}, {row['of']}: {told(row)}",
    )


if __name__ == "__main__":
    sys.exit(main())
