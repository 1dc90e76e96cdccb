"""Measure what a shape that was not seen before costs the host: planning for Hopper on any machine, and a whole call.

    python benchmarks/planning_time.py                 # get_kernels(cc=90), its length, and the first plan as text
    python benchmarks/planning_time.py --device cpu    # ef.linear as well, on small matrices, beside eager PyTorch
    python benchmarks/planning_time.py --device cuda   # the same on large matrices

The epilogues have been used before. Only M is new, or it was evicted from every cache by later ones. Each figure is the
median over the extents, with the 10th and the 90th percentile, because the host's times spread widely, and the first M
of a class of extents takes much longer. Each call is made twice, and the difference is taken call by call.

Hosts run Python at different speeds. To compare hosts, a loop that adds a thousand numbers is timed as well.

On a GPU with an empty store of kernels, workers compile during the first calls and take caches and cores from them. A
second run shows planning only.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timing import machine, save
from torch.nn import functional

import epifuse as ef
from epifuse.base.cache import CACHES


def gelu_residual(accum, bias, C):
    """A linear layer's bias, activation and residual connection."""
    D = functional.gelu(accum + bias) + C
    return D


def softmax(accum):
    """Weights of a router, which need whole rows of the product."""
    D = functional.softmax(accum, dim=-1)
    return D


class Scale(NamedTuple):
    """The products of one device: M is below `rows`, K is `size`. They are small on the CPU, where the time of a large
    product would hide the time of planning."""

    rows: int
    size: int
    experts: int
    dtype: torch.dtype


SCALES = {"cpu": Scale(2048, 64, 64, torch.float32), "cuda": Scale(8192, 4096, 1024, torch.bfloat16)}
WARM = 20  # calls that are made first and not counted


class Case(NamedTuple):
    """An epilogue of a product of M x `n` x K, and the names of its operands: `vectors` have `n` values, and `matrices`
    M rows."""

    epilogue: Callable[..., Any]
    scale: Scale
    n: int
    vectors: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()

    def operands(self, m: int, device: str) -> dict[str, torch.Tensor]:
        """The operands by name."""
        shapes = dict.fromkeys(self.vectors, (self.n,)) | dict.fromkeys(self.matrices, (m, self.n))
        return {name: torch.zeros(shape, dtype=self.scale.dtype, device=device) for name, shape in shapes.items()}


def cases(device: str) -> dict[str, Case]:
    """The cases by name, at the scale of a device."""
    scale = SCALES[device]
    return {
        "gelu + bias + residual": Case(gelu_residual, scale, scale.size, ("bias",), ("C",)),
        "softmax": Case(softmax, scale, scale.experts),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="how many extents")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="also call ef.linear there")
    parser.add_argument("--save", type=Path)
    given = parser.parse_args(argv)
    if given.device == "cpu":
        torch.set_num_threads(1)
    seconds = {"a thousand additions in Python": [additions() for _ in range(given.count)]}
    for name, case in cases("cuda").items():
        for what, taken in planned(case, given.count).items():
            seconds[f"{name}: get_kernels(cc=90), {what}"] = taken
    for name, case in cases(given.device).items() if given.device else ():
        for what, taken in called(case, given.device, given.count).items():
            seconds[f"{name}: {what}"] = taken
    found = {name: spread(taken) for name, taken in seconds.items()}
    for name, (median, low, high) in found.items():
        print(f"{name:70} {median:9.1f} us   {low:9.1f} to {high:.1f}")
    if given.save is not None:
        save(given.save, {**machine(given.device or "cpu"), "count": given.count, "microseconds": found})
    return 0


def additions() -> float:
    """Seconds of a loop that adds a thousand numbers."""
    start, total = time.perf_counter(), 0
    for number in range(1000):
        total += number
    return time.perf_counter() - start


def planned(case: Case, count: int) -> dict[str, list[float]]:
    """Seconds of finding the kernels for an M. The time to make the arguments is not included."""
    dtype, k = case.scale.dtype, case.scale.size

    def seconds(m: int) -> float:
        a, b = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((m, k), (case.n, k)))
        operands = case.operands(m, "meta")
        args = ef.GemmArguments(a, b.t(), epilogue=ef.EpilogueArguments.partial(case.epilogue, operands))
        start = time.perf_counter()
        kernels = ef.get_kernels(args, cc=90)
        assert kernels
        str(kernels[0].plan)
        return time.perf_counter() - start

    extents = Extents(case.scale.rows, count)
    extents.evict(seconds)
    return interleaved({"unseen M": (seconds, extents.unseen), "evicted M": (seconds, extents.evicted)})


def called(case: Case, device: str, count: int) -> dict[str, list[float]]:
    """Seconds of calls whose M is new or evicted, and of the same call again. The device is idle when a call begins.

    Memory for the result was allocated and freed before, because the allocator's cost of a new size is not measured.
    """
    dtype, k = case.scale.dtype, case.scale.size
    weight = torch.zeros(case.n, k, dtype=dtype, device=device)

    def fused(x: torch.Tensor, operands: dict[str, torch.Tensor]) -> None:
        ef.linear(x, weight, epilogue=case.epilogue, **operands)

    def eager(x: torch.Tensor, operands: dict[str, torch.Tensor]) -> None:
        case.epilogue(functional.linear(x, weight), **operands)

    def taken(run: Callable[..., None], m: int) -> tuple[float, float]:
        x, operands = torch.zeros(m, k, dtype=dtype, device=device), case.operands(m, device)
        found = []
        for _ in range(2):
            torch.zeros(m, case.n, dtype=dtype, device=device)
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            run(x, operands)
            found.append(time.perf_counter() - start)
        return found[0], found[1]

    ours, eagers = (lambda m: taken(fused, m)), (lambda m: taken(eager, m))
    extents = Extents(case.scale.rows, count)
    first = interleaved({"ef.linear, unseen M": (ours, extents.evicted), "eager, unseen M": (eagers, extents.eager)})
    extents.evict(ours)
    then = {"ef.linear, evicted M": (ours, extents.evicted), "ef.linear, another unseen M": (ours, extents.unseen)}
    pairs = first | interleaved(then)
    found = {}
    for name, both in pairs.items():
        found[name] = [first for first, _ in both]
        found[f"{name}, once more"] = [second for _, second in both]
        found[f"{name}, the difference"] = [first - second for first, second in both]
    return found


class Extents:
    """Extents in random order: `evicted` by `others`, `unseen` before they are timed, and for `eager` calls."""

    def __init__(self, rows: int, count: int) -> None:
        bound = max(cache.bound for cache in CACHES)
        if (most := (rows - 1 - bound) // 3 - WARM) < count:
            raise SystemExit(f"--count is at most {most}: there are {rows - 1} extents")
        drawn = iter(random.Random(0).sample(range(1, rows), rows - 1))
        self.evicted, self.unseen, self.eager = ([next(drawn) for _ in range(count + WARM)] for _ in range(3))
        self.others = [next(drawn) for _ in range(bound)]

    def evict(self, call: Callable[[int], Any]) -> None:
        """Call with the extents to be evicted, and then with as many others as the largest cache holds."""
        for m in (*self.evicted, *self.others):
            call(m)


def interleaved(variants: Mapping[str, tuple[Callable[[int], Any], Sequence[int]]]) -> dict[str, list[Any]]:
    """The results of each variant for its extents. The variants take turns."""
    found: dict[str, list[Any]] = {name: [] for name in variants}
    for turn in zip(*(extents for _, extents in variants.values()), strict=True):
        for (name, (run, _)), m in zip(variants.items(), turn, strict=True):
            found[name].append(run(m))
    return {name: taken[WARM:] for name, taken in found.items()}


def spread(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile in microseconds."""
    taken = sorted(seconds)
    chosen = statistics.median(taken), taken[len(taken) // 10], taken[9 * len(taken) // 10]
    return tuple(round(1e6 * x, 1) for x in chosen)  # type: ignore[return-value]  # a tuple of three


if __name__ == "__main__":
    sys.exit(main())
