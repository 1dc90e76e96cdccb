"""GPU time of products of 16-bit activations and an 8-bit weight with a scale for each column.

    python benchmarks/weight_only.py --save results.json [--tokens 1,16,64,4096] [--layers 4096x4096] [--rounds 15]

`int8` and `e4m3` are epifuse's products, in the best design. `registers` is int8 in the best design that converts the
weight in registers, and `converted first` in the best design that converts it in a kernel before; they show whether the
choice between the two is right. `bfloat16` is epifuse's product of the converted weight, with the scale in its
epilogue. Peers are `mm`, cuBLAS's product of the converted weight without a scale, and torch.compile of
`x @ w.to(bfloat16) * scale`. Each way takes turns over so many weights that these exceed four times the L2 cache, so
that each call reads its weight from memory.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from gpu_timing import Backlog, Calls, interleave, measured, parser_of, timed
from timing import paired_ratio

import epifuse as ef

TOKENS = "1,2,4,8,16,32,64,128,256,4096"
LAYERS = "4096x4096,6144x4096,14336x4096,4096x14336"
"""N x K of the layers: projections of a model of 8 billion parameters."""
BF16, INT8, E4M3 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
PAIRS = (
    ("int8", "mm"),
    ("e4m3", "mm"),
    ("int8", "bfloat16"),
    ("int8", "compiled"),
    ("e4m3", "compiled"),
    ("registers", "converted first"),
)
"""Pairs of ways whose times are compared round by round."""
_EXCEEDED, _MOST_SETS = 4, 64
_MOST_ERROR = 1e-4


def scaled(accum, scale):
    """The product times the scale by which a row of the weight was divided."""
    D = accum * scale
    return D


class Inputs(NamedTuple):
    """Activations, a weight of shape (N, K) in each dtype, and its scales."""

    x: torch.Tensor
    weights: Mapping[torch.dtype, torch.Tensor]
    scale: torch.Tensor

    @classmethod
    def of(cls, m: int, n: int, k: int, device: str) -> Inputs:
        """Make random activations and a weight: integers over the whole range, and floats made from these."""
        whole = torch.randint(-128, 128, (n, k), dtype=INT8, device=device)
        weights = {INT8: whole, E4M3: (whole.float() / 16).to(E4M3), BF16: whole.to(BF16)}
        return cls(torch.randn(m, k, dtype=BF16, device=device), weights, torch.rand(n, device=device) / k**0.5)


def arguments(inputs: Inputs, dtype: torch.dtype) -> ef.GemmArguments:
    """The arguments of a call, with memory for its result."""
    weight = inputs.weights[dtype]
    D = torch.empty(len(inputs.x), len(weight), dtype=BF16, device=weight.device)
    return ef.GemmArguments(inputs.x, weight.t(), epilogue=ef.EpilogueArguments(scaled, scale=inputs.scale, D=D))


def ours(sets: Sequence[Inputs], dtype: torch.dtype, *, swapped: bool | None = None) -> tuple[Calls, str] | None:
    """Bound launches and the name of the best kernel, or None if there is none.

    If `swapped` is given, only kernels that exchange A and B, or only those that do not, are considered.
    """
    made = [arguments(inputs, dtype) for inputs in sets]
    kernels = ef.get_kernels(made[0])
    chosen = [each for each in kernels if swapped is None or each.plan.spec.design.swapped is swapped]
    if not chosen:
        return None
    return [chosen[0].bind(args) for args in made], chosen[0].metadata.kernel_name


def ways(sets: Sequence[Inputs]) -> tuple[dict[str, Calls], dict[str, str]]:
    """All calls by name, and the names of epifuse's kernels."""
    calls: dict[str, Calls] = {}
    names: dict[str, str] = {}
    asked = {
        "int8": ours(sets, INT8),
        "e4m3": ours(sets, E4M3),
        "bfloat16": ours(sets, BF16),
        "registers": ours(sets, INT8, swapped=True),
        "converted first": ours(sets, INT8, swapped=False),
    }
    for name, found in asked.items():
        if found is not None:
            calls[name], names[name] = found
    torch._dynamo.reset()  # torch.compile compiles a function for eight shapes, from the second on with symbols
    function = torch.compile(lambda x, w, scale: x @ w.to(BF16).t() * scale.to(BF16), dynamic=False)
    calls["mm"] = [_mm(inputs) for inputs in sets]
    calls["compiled"] = [_called(function, inputs) for inputs in sets]
    return calls, names


def _mm(inputs: Inputs) -> Callable[[], Any]:
    x, b = inputs.x, inputs.weights[BF16].t()
    out = torch.empty(len(x), b.shape[1], dtype=BF16, device=x.device)
    return lambda: torch.mm(x, b, out=out)


def _called(function: Callable[..., Any], inputs: Inputs) -> Callable[[], Any]:
    return lambda: function(inputs.x, inputs.weights[INT8], inputs.scale)


def count_of_sets(n: int, k: int) -> int:
    """The number of 8-bit weights that exceed the L2 cache `_EXCEEDED` times, at most `_MOST_SETS`."""
    l2 = torch.cuda.get_device_properties("cuda").L2_cache_size
    return min(-(-_EXCEEDED * l2 // (n * k)) + 1, _MOST_SETS)


def mean_error(inputs: Inputs) -> float:
    """The mean error of the int8 product relative to the mean value, against float64."""
    D = ef.gemm(inputs.x, inputs.weights[INT8].t(), epilogue=scaled, scale=inputs.scale, out_dtypes=torch.float32)
    want = inputs.x.double() @ inputs.weights[INT8].double().t() * inputs.scale.double()
    return float((D.double() - want).abs().mean() / want.abs().mean())


def measure(m: int, n: int, k: int, rounds: int, backlog: Backlog) -> dict[str, Any]:
    """Measure one layer: microseconds, and ratios with their 95 % intervals."""
    sets = [Inputs.of(m, n, k, "cuda") for _ in range(count_of_sets(n, k))]
    error = mean_error(sets[0])
    assert error < _MOST_ERROR, f"{m}x{n}x{k} has a mean error of {error}: times of wrong results are none"
    calls, names = ways(sets)
    seconds = interleave(calls, rounds, backlog)
    ratios = {
        f"{name} / {base}": [round(x, 4) for x in paired_ratio(seconds, name, base)]
        for name, base in PAIRS
        if name in seconds and base in seconds
    }
    return {
        "shape": [m, n, k],
        "sets": len(sets),
        "kernels": names,
        "microseconds": {name: round(statistics.median(times) * 1e6, 2) for name, times in seconds.items()},
        "ratios": ratios,
        "mean_error": error,
    }


def _layers(text: str) -> list[tuple[int, int]]:
    pairs = [tuple(map(int, one.split("x"))) for one in text.split(",")]
    return [(n, k) for n, k in pairs]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=lambda text: list(map(int, text.split(","))), default=TOKENS)
    parser.add_argument("--layers", type=_layers, default=LAYERS)
    options = parser.parse_args(argv)
    places = [(m, n, k) for n, k in options.layers for m in options.tokens]
    return measured(options, places, measure, timed)


if __name__ == "__main__":
    sys.exit(main())
