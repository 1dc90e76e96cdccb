"""Compare the host time of small products on the CPU by eager PyTorch, a bound call and `ef.gemm`, interleaved.

python benchmarks/small_products.py [--rounds 101] [--extent 64] [--save benchmarks/results/small_products.json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timing import command, interleave, machine, paired_ratio, save
from torch.nn import functional as F

import epifuse as ef

CALLS = 20  # calls of one way in a round, because reading a timer costs as much as the overhead of a launch


def plain(accum):
    """The product alone."""
    return accum


def gelu_bias_residual(accum, b, r):
    """The product with a bias, gelu and a residual."""
    return ef.gelu(accum + b) + r


def ways(extent: int) -> Mapping[str, Mapping[str, Callable[[], Any]]]:
    """For each epilogue, its calls by name: eager PyTorch, a bound call and `ef.gemm`."""
    torch.manual_seed(0)
    x, w, r = (torch.randn(extent, extent) for _ in range(3))
    b, out = torch.randn(extent), torch.empty(extent, extent)
    given = {"b": b, "r": r}
    return {
        "plain": {
            "eager": lambda: torch.mm(x, w),
            "bound": _bound(ef.GemmArguments(x, w, out)),
            "ef.gemm": lambda: ef.gemm(x, w),
        },
        "gelu(x @ w + b) + r": {
            "eager": lambda: F.gelu(x @ w + b) + r,
            "bound": _bound(
                ef.GemmArguments(x, w, out, epilogue=ef.EpilogueArguments(gelu_bias_residual, **given, D=out))
            ),
            "ef.gemm": lambda: ef.gemm(x, w, epilogue=gelu_bias_residual, b=b, r=r),
        },
    }


def _bound(args: ef.GemmArguments) -> Callable[[], Any]:
    return ef.get_kernels(args)[0].bind(args)


def _repeated(call: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def measure(variants: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """Microseconds of a call, and ratios to eager with their 95 % intervals."""
    seconds = interleave({name: _repeated(call) for name, call in variants.items()}, rounds)
    return {
        "microseconds": {name: round(statistics.median(times) / CALLS * 1e6, 2) for name, times in seconds.items()},
        "ratio to eager": {
            name: [round(x, 3) for x in paired_ratio(seconds, name, "eager")] for name in seconds if name != "eager"
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; save if `--save` is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--extent", type=int, default=64)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = {}
    for name, variants in ways(options.extent).items():
        results[name] = measure(variants, options.rounds)
        print(name, results[name], flush=True)
    if options.save:
        save(
            options.save,
            {"machine": machine(), "command": command(sys.argv), "extent": options.extent, "results": results},
        )


if __name__ == "__main__":
    main()
