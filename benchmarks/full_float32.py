"""Compare GPU time and errors of products in full float32 precision with cuBLAS's. PyTorch's tf32 is switched off.

    python benchmarks/full_float32.py --save results.json [--shapes 4096x4096x4096] [--rounds 15]

`plain` is compared with `torch.mm`, and `bias gelu` with PyTorch's `torch.addmm` and gelu, eager and compiled. B is the
transpose of a weight; `plain, B by rows` shows what another layout costs the kernel that writes the parts of float32.
`plain, tf32` is the time of one of the three products of parts. All of a shape are interleaved in one run. Errors are
against float64: the root of their mean square, relative to that of the values, for normal and for positive numbers, of
the first rows.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from gpu_timing import Backlog, interleave, measured, parser_of, timed
from timing import paired_ratio

import epifuse as ef

SHAPES = "4096x4096x4096,8192x8192x2048,4096x14336x4096"
ROWS = 256  # the rows whose errors are measured
Shape = tuple[int, int, int]
Call = Callable[[], Any]


def plain(accum):
    """The product alone."""
    D = accum
    return D


def bias_gelu(accum, bias):
    """A layer's bias and activation."""
    D = ef.gelu(accum + bias, approximate="tanh")
    return D


class Own(NamedTuple):
    """One variant of epifuse. `by_columns` says whether B is the transpose of a weight."""

    epilogue: Callable[..., Any]
    by_columns: bool = True
    precision: str = "ieee"


OURS: Mapping[str, Own] = {
    "plain": Own(plain),
    "plain, B by rows": Own(plain, by_columns=False),
    "plain, tf32": Own(plain, precision="tf32"),
    "bias gelu": Own(bias_gelu),
}
PAIRS = (
    ("plain", "mm"),
    ("plain, B by rows", "mm"),
    ("plain", "plain, tf32"),
    ("bias gelu", "addmm and gelu"),
    ("bias gelu", "addmm and gelu, compiled"),
    ("bias gelu", "plain"),
)
"""Pairs of variants whose times are compared round by round."""


class Inputs(NamedTuple):
    """A; B as the transpose of a weight (`b`) and contiguous by rows (`by_rows`); a bias."""

    a: torch.Tensor
    b: torch.Tensor
    by_rows: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def of(cls, shape: Shape) -> Inputs:
        """Make inputs of normal numbers."""
        m, n, k = shape
        a, weight, bias = (torch.randn(size, device="cuda") for size in ((m, k), (n, k), (n,)))
        return cls(a, weight.t(), weight.t().contiguous(), bias)


def ours(own: Own, inputs: Inputs) -> tuple[Call, dict[str, Any]]:
    """A bound launch of the best kernel; its name and the bytes of its workspace."""
    b = inputs.b if own.by_columns else inputs.by_rows
    given = {"bias": inputs.bias} if own.epilogue is bias_gelu else {}
    D = torch.empty(inputs.a.shape[0], b.shape[1], device=b.device)
    epilogue = ef.EpilogueArguments(own.epilogue, **given, D=D)
    args = ef.GemmArguments(inputs.a, b, epilogue=epilogue, constraints=ef.Constraints(precision=own.precision))
    kernel = ef.get_kernels(args)[0]
    told = {"name": kernel.metadata.kernel_name, "workspace": kernel.get_workspace_size(args)}
    return kernel.bind(args), told


def peers(inputs: Inputs) -> dict[str, Call]:
    """PyTorch's calls, by name."""
    a, b, _, bias = inputs
    out = torch.empty(a.shape[0], b.shape[1], device=a.device)

    def layer(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(torch.addmm(bias, a, b), approximate="tanh")

    torch._dynamo.reset()  # torch.compile compiles a function for eight shapes, from the second on with symbols
    compiled = torch.compile(layer, dynamic=False)
    return {
        "mm": lambda: torch.mm(a, b, out=out),
        "addmm and gelu": lambda: layer(a, b, bias),
        "addmm and gelu, compiled": lambda: compiled(a, b, bias),
    }


def errors(inputs: Inputs) -> dict[str, dict[str, float]]:
    """Relative errors of epifuse and of PyTorch, for normal and for positive numbers."""
    found = {}
    for name, of in (("normal", torch.clone), ("positive", torch.abs)):
        a, b = of(inputs.a[:ROWS]), of(inputs.b.t()).t()
        want = a.double() @ b.double()
        size = want.square().mean().sqrt()
        products = {"epifuse": ef.gemm(a, b, precision="ieee"), "mm": a @ b}
        found[name] = {one: float((D.double() - want).square().mean().sqrt() / size) for one, D in products.items()}
    return found


def measure(shape: Shape, rounds: int, backlog: Backlog) -> dict[str, Any]:
    """Measure one shape: microseconds, ratios with their 95 % intervals, and errors."""
    inputs, calls, kernels = Inputs.of(shape), {}, {}
    for name, own in OURS.items():
        calls[name], kernels[name] = ours(own, inputs)
    calls |= peers(inputs)
    for call in calls.values():
        call()
    seconds = interleave({name: [call] for name, call in calls.items()}, rounds, backlog)
    return {
        "shape": list(shape),
        "kernels": kernels,
        "microseconds": {name: round(statistics.median(times) * 1e6, 2) for name, times in seconds.items()},
        "ratios": {
            f"{name} / {base}": [round(x, 4) for x in paired_ratio(seconds, name, base)] for name, base in PAIRS
        },
        "errors": errors(inputs),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    options = parser_of(__doc__, SHAPES).parse_args(argv)
    torch.set_float32_matmul_precision("highest")
    return measured(
        options,
        zip(options.shapes),
        measure,
        lambda row: f"{timed(row, itemgetter('name'))}\n  errors {row['errors']}",
    )


if __name__ == "__main__":
    sys.exit(main())
