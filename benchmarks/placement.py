"""Measure on this GPU what it gains that the clusters of one group of multiprocessors (GPC) take neighbouring tiles.

    python benchmarks/placement.py --save benchmarks/results/placement_NAME.json [--products 4096x4096x4096,...]

The kernel that is chosen for each product is timed with three tables of ranks, which say in which order clusters take
tiles. The first has the groups that were measured on this GPU. The second assumes eight groups that get clusters in
turn. In the third, clusters take tiles in the order of their numbers. cuBLAS is timed too. All are interleaved, with so
many sets of operands in turn that they exceed four times the L2 cache. Prints the groups first.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from gemm_cases import Operands
from layers import Product, parsed
from shapes import PLAIN, Calls, cublas, sets_of
from timing import command, machine, save

import epifuse as ef
from epifuse.providers.cutedsl import clusters
from epifuse.runtime.timing import in_turn

PRODUCTS = (
    "4608x1152x8192,1435x1152x6912,524x2560x10240,1024x1152x4608,462x2048x2048,2048x640x2560,tn:1408x1408x65536,"
    "tn:1920x640x4096,4096x4096x4096,8192x8192x512,16384x4096x1024,512x4096x4096"
)
GROUPED, ASSUMED, NUMBERED = "by groups", "eight groups assumed", "as numbered"


def groups(size: int) -> list[int] | None:
    """For each cluster of `size` CTAs that runs at once, the number of its group of multiprocessors.

    None if clusters are not placed on the same groups in two launches.
    """
    first = clusters.placed(0, size, clusters.resident_clusters(0, size))
    numbers = {group: number for number, group in enumerate(dict.fromkeys(first or ()))}
    return first and [numbers[group] for group in first]


def variants(sets: Sequence[Operands]) -> tuple[str, dict[str, Calls]]:
    """The name of the chosen kernel, and its calls by table of ranks."""
    arguments = [PLAIN.arguments(x) for x in sets]
    kernel = ef.get_kernels(arguments[0], limit=1)[0]
    runner: Any = kernel.compile(arguments[0]).prepared.runner
    count, words = runner._count_clusters(), clusters.rank_words(runner.cluster_size)
    turns = [cluster % clusters.GROUPS for cluster in range(count)]
    made: dict[str, Calls] = {}
    for name, own in ((GROUPED, None), (ASSUMED, turns), (NUMBERED, [0] * count)):
        launched = copy(runner)
        if own is not None:
            _TABLES.append(clusters.RankTable(own, words))
            launched.ranks, launched.clusters = _TABLES[-1].address, count
        made[name] = [launched(x.a, x.b, {}, {"D": x.D}) for x in sets]
    return kernel.metadata.kernel_name, made


_TABLES: list[clusters.RankTable] = []
"""All tables that were made. They are kept, because launches hold only their addresses."""


def measure(product: Product, rounds: int) -> dict[str, Any]:
    """The name of the chosen kernel, and microseconds of each way."""
    sets = sets_of(product, "cuda")
    name, made = variants(sets)
    made["cuBLAS"] = cublas(sets)
    taken = in_turn([*made.values()], torch.device("cuda"), rounds, close=math.inf)
    times = {way: round(1e6 * statistics.median(each), 2) for way, each in zip(made, taken, strict=True)}
    return {"kernel": name, "microseconds": times}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", default=PRODUCTS, help="as in 4096x4096x4096,tn:1024x1024x65536")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    placed = {str(size): groups(size) for size in (1, 2)}
    print(placed, flush=True)
    rows = {}
    for product in map(parsed, options.products.split(",")):
        rows[product.name] = row = measure(product, options.rounds)
        print(f"{product.name}: {row['kernel']} {row['microseconds']}", flush=True)
        torch.cuda.empty_cache()
    if options.save:
        save(options.save, {"placed": placed, "products": rows, **machine("cuda"), "command": command(sys.argv)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
