"""What a shape that was not seen before costs the host: planning for Hopper on any machine, and a whole call.

    python benchmarks/planning_time.py                 # get_kernels(cc=90), its length, and the first plan as text
    python benchmarks/planning_time.py --device cuda   # ef.linear as well, beside a shape seen before

The epilogues are known by then, only M is new. Each figure is the median over the extents, with the 10th and the 90th
percentile: the host's spread is wide, and a first M of a class of extents takes as long as all planning once did.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timing import machine, save

import epifuse as ef

SIZE = 4096


def gelu_residual(accum, bias, C):
    """A linear layer's bias, activation and residual connection."""
    D = ef.gelu(accum + bias) + C
    return D


def softmax(accum):
    """Weights of a router: every row is needed whole."""
    D = ef.softmax(accum, dim=-1)
    return D


class Case(NamedTuple):
    """An epilogue over M x `n` x 4096; operands that have M rows are made for each M."""

    epilogue: Callable[..., Any]
    n: int
    vectors: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()

    def operands(self, m: int, device: str) -> dict[str, torch.Tensor]:
        """Operands by name."""
        shapes = dict.fromkeys(self.vectors, (self.n,)) | dict.fromkeys(self.matrices, (m, self.n))
        return {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}


CASES = {"gelu + bias + residual": Case(gelu_residual, SIZE, ("bias",), ("C",)), "softmax": Case(softmax, 1024)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="how many extents")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="also call ef.linear there")
    parser.add_argument("--save", type=Path)
    given = parser.parse_args(argv)
    found = {}
    for name, case in CASES.items():
        found[f"{name}: get_kernels(cc=90)"] = measure(planning(case), given.count)
        if given.device is not None:
            unseen, seen = called(case, given.device)
            found[f"{name}: ef.linear, unseen M"] = measure(unseen, given.count)
            found[f"{name}: ef.linear, seen M"] = measure(seen, given.count)
    for name, (median, low, high) in found.items():
        print(f"{name:50} {median:9.1f} us   {low:9.1f} to {high:.1f}")
    if given.save is not None:
        save(given.save, {**machine(given.device or "cpu"), "count": given.count, "microseconds": found})
    return 0


def planning(case: Case) -> Callable[[int], float]:
    """Seconds of finding the kernels for an M, without what describes the arguments."""

    def seconds(m: int) -> float:
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
        a, b = torch.empty(m, SIZE, **options), torch.empty(case.n, SIZE, **options).t()
        operands = case.operands(m, "meta")
        args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(case.epilogue, operands))
        start = time.perf_counter()
        kernels = ef.get_kernels(args, cc=90)
        assert kernels
        str(kernels[0].plan)
        return time.perf_counter() - start

    return seconds


def called(case: Case, device: str) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """Seconds of a call whose M is new, and of the same call again; the device is idle when one begins.

    Memory for the result lies ready: what a new size costs the allocator is not ours.
    """
    weight = torch.empty(case.n, SIZE, dtype=torch.bfloat16, device=device)

    def seconds(m: int) -> float:
        x = torch.empty(m, SIZE, dtype=torch.bfloat16, device=device)
        operands = case.operands(m, device)
        torch.empty(m, case.n, dtype=torch.bfloat16, device=device)
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        ef.linear(x, weight, epilogue=case.epilogue, **operands)
        return time.perf_counter() - start

    def again(m: int) -> float:
        seconds(m)
        return seconds(m)

    return seconds, again


def measure(seconds: Callable[[int], float], count: int) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile in microseconds, over extents in random order after some others."""
    extents = random.Random(0).sample(range(1, 8192), count + 20)
    taken = sorted([seconds(m) for m in extents][20:])
    return tuple(round(1e6 * x, 1) for x in (statistics.median(taken), taken[count // 10], taken[9 * count // 10]))  # type: ignore[return-value]  # three


if __name__ == "__main__":
    sys.exit(main())
