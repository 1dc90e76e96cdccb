"""What each graph optimisation gains: the same epilogue with the pass and without, on the CPU's panel kernel.

Operator fission is not among them: it is for kernels that compute in registers, which the panel kernel does not.

python benchmarks/passes.py --rounds 21 --save benchmarks/results/passes.json
"""

from __future__ import annotations

import argparse
import statistics
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from timing import interleave, machine, paired_ratio, save

import epifuse as ef
from epifuse import arguments, passes
from epifuse.runtime import cache


def fused(accum: Any, C: Any) -> Any:
    x = accum + C
    D = x * (1 / (1 + ef.exp(-x)))
    return D


def eliminated(accum: Any, onehot: Any, scale: Any) -> Any:
    D = accum * scale
    total = ef.sum(ef.assume_one_hot(onehot) * scale, dim=-1, keepdim=True)
    return D, total


def summed(accum: Any, onehot: Any, scale: Any) -> Any:
    D = accum * scale
    total = ef.sum(onehot * scale, dim=-1, keepdim=True)
    return D, total


def gradient(accum: Any, C: Any) -> Any:
    p = ef.sigmoid(accum)
    loss = -ef.sum(C * ef.log(p) + (1 - C) * ef.log(1 - p))  # noqa: F841 - what prune is for
    D = p - C
    return D


def gradient_and_loss(accum: Any, C: Any) -> Any:
    p = ef.sigmoid(accum)
    loss = -ef.sum(C * ef.log(p) + (1 - C) * ef.log(1 - p))
    D = p - C
    return D, loss


class Case(NamedTuple):
    """An epilogue, and what it is like without the pass: said differently, or with the pass left out."""

    epilogue: Callable[..., Any]
    otherwise: Callable[..., Any] | None = None


CASES: Mapping[str, Case] = {
    "fuse_operators": Case(fused),
    "eliminate_reductions": Case(eliminated, summed),
    "prune": Case(gradient, gradient_and_loss),  # a value nobody needs is never met: what it would cost is to need it
}


def launches(size: int, depth: int) -> dict[str, Callable[[], Any]]:
    """Bound calls by pass, with it and without."""
    a, b = torch.randn(size, depth) / depth**0.5, torch.randn(depth, size)
    operands = {
        "C": torch.rand(size, size),
        "onehot": torch.eye(size)[torch.randperm(size)],
        "scale": torch.randn(size, 1),
    }
    found: dict[str, Callable[[], Any]] = {}
    for name, case in CASES.items():
        found[name] = bound(case.epilogue, a, b, operands)
        less = tuple(step for step in passes.PIPELINE if case.otherwise or step.__name__ != name)
        with mock.patch.object(passes, "PIPELINE", less):
            found[f"without {name}"] = bound(case.otherwise or case.epilogue, a, b, operands)
    return found


def bound(
    epilogue: Callable[..., Any], a: torch.Tensor, b: torch.Tensor, operands: Mapping[str, Any]
) -> Callable[[], Any]:
    """Everything decided, onto outputs of its own; typed and built anew, whatever the pipeline was before."""
    arguments.typed_graph.cache_clear()
    given = {name: operands[name] for name in arguments.parsed(epilogue).parameters}
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(epilogue, given))
    (kernel,) = (kernel for kernel in ef.get_kernels(args) if kernel.spec.name == "cpu_panel")
    with mock.patch.object(cache, "_built", OrderedDict()):
        return kernel.bind(args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--size", type=int, default=2048, help="M = N")
    parser.add_argument("--depth", type=int, default=64, help="K")
    parser.add_argument("--save", type=Path, help="where the results go, as JSON")
    options = parser.parse_args()
    calls = launches(options.size, options.depth)
    seconds = interleave(calls, options.rounds)
    rows = {}
    print(f"M = N = {options.size}, K = {options.depth}, float32; milliseconds, and the ratio with / without")
    for name in CASES:
        ratio, low, high = paired_ratio(seconds, name, f"without {name}")
        here, there = (statistics.median(seconds[key]) * 1e3 for key in (name, f"without {name}"))
        rows[name] = {
            "with_ms": round(here, 2),
            "without_ms": round(there, 2),
            "ratio": [round(x, 3) for x in (ratio, low, high)],
        }
        print(f"{name:22} {here:8.2f} {there:8.2f}   {ratio:.2f} ({low:.2f} to {high:.2f})")
    if options.save:
        save(options.save, {"machine": machine(), "size": options.size, "depth": options.depth, "passes": rows})


if __name__ == "__main__":
    main()
