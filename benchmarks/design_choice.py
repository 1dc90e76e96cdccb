"""Plain products in every design of the Hopper kernel, and by cuBLAS: what the model that orders designs must match.

    python benchmarks/design_choice.py --save benchmarks/results/design_choice.json

Products are of bfloat16, B by columns, replayed from CUDA graphs over sets of operands whose weights exceed the L2
cache together, in random order within each round. What a saved file says besides its times is kept.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gemm_variants
import torch
from gemm_cases import CASES, SHAPES, Operands, shapes
from timing import machine

import epifuse as ef

LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # N and K of an 8B Llama
LAYER_ROWS = (1, 16, 128, 256, 512, 1024, 2048)
MORE = (
    (16384, 256, 4096),
    (16384, 512, 4096),
    (16384, 1024, 4096),
    (16384, 2048, 4096),
    (32768, 512, 2048),
    (8192, 1024, 4096),
    (3072, 4096, 4096),
    (4096, 4096, 1024),
    (4096, 4096, 8192),
    (4096, 6144, 4096),
    (4096, 8192, 4096),
    (4096, 11008, 4096),
    (8192, 4096, 1024),
    (2048, 8192, 4096),
    (2048, 14336, 4096),
    (6144, 6144, 6144),
    (5120, 5120, 5120),
)
"""From a few waves of tiles to many: where two warp groups on one tile and one tile for each are close."""
PRODUCTS = tuple(dict.fromkeys((*SHAPES, *((m, n, k) for m in LAYER_ROWS for n, k in LAYERS), *MORE)))
_WEIGHTS = 128 << 20  # bytes of all sets together, of an L2 cache of 50 MB
_MOST_SETS = 16
_GRAPH_SECONDS = 1.5e-3
PLAIN = next(case for case in CASES if case.name == "plain")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", type=shapes, default=PRODUCTS, help="as in 4096x4096x4096,64x14336x4096")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    random.seed(0)
    found = {}
    for product in options.products:
        name = "x".join(map(str, product))
        found[name] = measured(product, options.rounds)
        chosen, best = next(iter(found[name])), min(found[name], key=lambda each: found[name][each])
        print(f"{name}: {chosen} {found[name][chosen]:.1f} us, best {best} {found[name][best]:.1f} us", flush=True)
    if options.save:
        save(options.save, found, options.rounds)
    return 0


def measured(product: tuple[int, int, int], rounds: int) -> dict[str, float]:
    """Median microseconds of each design, best first by the model, and of torch.mm."""
    _, n, k = product
    sets = [Operands.random(*product) for _ in range(min(_MOST_SETS, max(2, -(-_WEIGHTS // (2 * n * k)))))]
    arguments = [PLAIN.arguments(x) for x in sets]
    want = gemm_variants.reference(PLAIN, sets[0])
    calls: dict[str, list[Callable[[], Any]]] = {}
    for kernel in ef.get_kernels(arguments[0]):
        artifact = kernel.compile(arguments[0])
        calls[kernel.metadata.kernel_name] = [partial(kernel.run, x, compiled_artifact=artifact) for x in arguments]
        calls[kernel.metadata.kernel_name][0]()
        gemm_variants.compare((sets[0].D,), want)
        sets[0].D.zero_()
    calls["torch"] = [partial(torch.mm, x.a, x.b, out=x.D) for x in sets]
    repeats = _repeats(calls["torch"])
    graphs = {name: _captured(each, repeats) for name, each in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in graphs}
    for round_ in range(2 + rounds):
        for name in random.sample(list(graphs), len(graphs)):
            taken = _seconds(graphs[name].replay) / repeats
            if round_ >= 2:
                seconds[name].append(taken)
    return {name: round(1e6 * statistics.median(times), 2) for name, times in seconds.items()}


def _repeats(calls: Sequence[Callable[[], Any]]) -> int:
    """Calls in a graph: whole turns through the sets, and some time of work."""
    for call in calls:
        call()
    once = _seconds(lambda: [call() for call in calls])
    return len(calls) * max(1, round(_GRAPH_SECONDS / once))


def _captured(calls: Sequence[Callable[[], Any]], repeats: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeats):
            calls[i % len(calls)]()
    return graph


def _seconds(call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def save(path: Path, found: dict[str, dict[str, float]], rounds: int) -> None:
    """The products of the file, those measured now replaced."""
    before = json.loads(path.read_text()) if path.exists() else {"products": {}}
    products = before["products"]
    for name, microseconds in found.items():
        products[name] = {**products.get(name, {}), "microseconds": microseconds}
    path.write_text(json.dumps({**before, **machine("cuda"), "rounds": rounds, "products": products}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
