"""Compare the GPU time of products of few rows with the time to read their weight and with cuBLAS, and measure what
`batch_invariant` costs.

    python benchmarks/few_rows.py --save results.json [--rows 1,4,16,64] [--rounds 20]

The products are layers of decoders, replayed from a CUDA graph. Calls take turns over so many weights that these exceed
four times the L2 cache. `floor` is the time to read the weight at 0.92 of the rate at which this GPU reads, which is
measured first, and 4 us. `bias + silu` and `batch_invariant` are compared with the plain product, for these layers;
`batch_invariant` is also measured for the shapes of gemm_epilogue.py.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gemm_cases import SHAPES, Operands
from layers import Product
from shapes import Calls, cublas, sets_of
from timing import command, machine, save
from torch.nn import functional as F

import epifuse as ef
from epifuse.runtime.timing import in_turn

LAYERS = (
    ("Llama 3 8B, q, k and v", 6144, 4096),
    ("Llama 3 8B, output", 4096, 4096),
    ("Llama 3 8B, gate and up", 28672, 4096),
    ("Llama 3 8B, down", 4096, 14336),
    ("Qwen2.5 7B, down", 3584, 18944),
    ("Qwen2.5 32B, q, k and v", 7168, 5120),
    ("Llama 2 70B, output", 8192, 8192),
    ("Gemma 2 9B, q, k and v", 8192, 3584),
    ("Phi-4, output", 5120, 5120),
    ("Mistral Nemo, gate and up", 28672, 5120),
)
"""The model and the name of a layer, its N and its K."""
RATE, MORE = 0.92, 4e-6
"""What a product of few rows should reach: a share of the GPU's rate of reading, and seconds in addition."""


def plain(accum):
    """The product alone."""
    D = accum
    return D


def bias_silu(accum, bias):
    """A layer's bias and activation."""
    D = F.silu(accum + bias)
    return D


def ours(sets: Sequence[Operands], function: Callable[..., Any] = plain, **asked: Any) -> Calls:
    """A call for each set of operands. `asked` are constraints."""
    calls: Calls = []
    for x in sets:
        given = {"bias": x.bias} if function is bias_silu else {}
        epilogue = ef.EpilogueArguments(function, **given, D=x.D)
        args = ef.GemmArguments(x.a, x.b, epilogue=epilogue, constraints=ef.Constraints(**asked))
        kernel = ef.get_kernels(args, limit=1)[0]
        calls.append(partial(kernel.run, args, compiled_artifact=kernel.compile(args)))
    return calls


def timed(variants: Mapping[str, Calls], rounds: int) -> dict[str, float]:
    """Median microseconds of each variant."""
    taken = in_turn([*variants.values()], torch.device("cuda"), rounds, close=math.inf)
    return {name: round(1e6 * statistics.median(each), 3) for name, each in zip(variants, taken, strict=True)}


def reading() -> float:
    """The rate at which the GPU reads, in bytes a second, measured by the maximum of 4 GB of float32."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    out = torch.empty((), dtype=torch.float32, device="cuda")
    (taken,) = in_turn([[lambda: torch.amax(data, dim=0, out=out)]], torch.device("cuda"), 10)
    return data.nbytes / statistics.median(taken)


def row_of(name: str, m: int, n: int, k: int, rate: float, rounds: int) -> dict[str, Any]:
    """Measure one product. Return its row of the results. `name` is empty for the shapes of gemm_epilogue.py."""
    sets = sets_of(Product(m, n, k, 1, "nt"), "cuda")
    variants = {"plain": ours(sets), "batch_invariant": ours(sets, batch_invariant=True), "cuBLAS": cublas(sets)}
    if name:
        variants["bias + silu"] = ours(sets, bias_silu)
    floor = {"floor": round(1e6 * (2 * n * k / (RATE * rate) + MORE), 3)} if name else {}
    return {"of": name, "shape": [m, n, k], "microseconds": {**timed(variants, rounds), **floor}}


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """The mean and the largest of each ratio, as text."""
    few, many = [[row["microseconds"] for row in rows if bool(row["of"]) == kind] for kind in (True, False)]

    def line(said: str, found: Sequence[float]) -> str:
        mean = math.exp(statistics.fmean(math.log(one) for one in found))
        return f"{said}: mean {mean:.3f}, largest {max(found):.3f}, of {len(found)}"

    return "\n".join(
        [
            line("plain / floor", [row["plain"] / row["floor"] for row in few]),
            line("plain / cuBLAS", [row["plain"] / row["cuBLAS"] for row in few]),
            f"bias + silu: {max(row['bias + silu'] - row['plain'] for row in few):.2f} us more at most",
            line("batch_invariant / plain, few rows", [row["batch_invariant"] / row["plain"] for row in few]),
            *([line("batch_invariant / plain", [r["batch_invariant"] / r["plain"] for r in many])] if many else []),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [int(m) for m in text.split(",")], default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args(argv)
    rate, rows = reading(), []
    results = {**machine("cuda"), "command": command(sys.argv), "read_bytes_a_second": round(rate), "rows": rows}
    print(f"reads {rate / 1e12:.3f} TB/s", flush=True)
    products = [(name, m, n, k) for name, n, k in LAYERS for m in options.rows]
    for name, m, n, k in [*products, *(("", *shape) for shape in SHAPES)]:
        rows.append(row_of(name, m, n, k, rate, options.rounds))
        print(f"{m}x{n}x{k} {name}: {rows[-1]['microseconds']}", flush=True)
        if options.save:
            save(options.save, results)
        torch.cuda.empty_cache()
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
