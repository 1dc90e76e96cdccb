"""Measure how long kernels wait for their own machine code: after their own launch, after other kernels, and after a
kernel that overwrites the L2 cache.

python benchmarks/cold_code.py --save benchmarks/results/

1024 x 4096 x 1024 gives each multiprocessor one tile. The profiler measures microseconds, of the main kernel only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from timing import machine

import epifuse as ef
from epifuse.kernel import Kernel

M, N, K = 1024, 4096, 1024
TILES = ("128x256_cooperative", "128x192_cooperative", "256x128_cooperative", "128x128_pingpong", "128x96_pingpong")
TILES += ("64x128_pingpong",)


def plain(accum: Any) -> Any:
    D = accum
    return D


def gelu_tanh_backward(accum: Any, Z: Any) -> Any:
    x = Z.to(torch.float32)
    i = ef.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    D = accum * (0.5 * (1 + i) + 0.5 * x * (1 - i * i) * 0.7978845608028654 * (1 + 0.134145 * x * x))
    return D


def gelu_backward(accum: Any, Z: Any) -> Any:
    z = Z.to(torch.float32)
    D = accum * (0.5 * (1 + ef.erf(z * 0.7071067811865476)) + z * (ef.exp(z * z * -0.5) * 0.3989422804014327))
    return D


def cross_entropy(accum: Any, Z: Any) -> Any:
    D = (ef.sigmoid(accum) - Z) * 0.25 + ef.where(accum > 19.0, accum, ef.log1p(2.0 * ef.exp(accum))) - accum * Z
    return D


EPILOGUES = (plain, gelu_tanh_backward, gelu_backward, cross_entropy)


def times_of(kernel: Kernel, args: ef.GemmArguments, between: Callable[[], Any], rounds: int = 8) -> float:
    """The median time of a launch that follows `between`, in microseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(rounds):
            between()
            kernel.run(args)
        torch.cuda.synchronize()
    return statistics.median(each.device_time for each in found.events() if "epifuse" in each.name)


def settings() -> Mapping[str, Callable[[], Any]]:
    """The work that runs between two launches, by name."""
    half, single = torch.randn(2048, 2048, device="cuda").half(), torch.randn(1024, 1024, device="cuda")
    beyond = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def others() -> None:
        torch.mm(half, half)
        torch.mm(single, single)
        torch.softmax(single, -1)
        torch.nn.functional.gelu(single)
        torch.sort(single[:64])
        torch.mm(single.double()[:256], single.double()[:, :256])

    return {"nothing": lambda: None, "other kernels": others, "L2 overwritten": lambda: beyond.fill_(1)}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="a folder")
    options = parser.parse_args()
    between, rows = settings(), []
    for epilogue in EPILOGUES:
        a, b = (torch.randn(size, K, device="cuda").bfloat16() for size in (M, N))
        given = {} if epilogue is plain else {"Z": torch.rand(M, N, device="cuda").bfloat16()}
        args = ef.GemmArguments(a, b.T, epilogue=ef.EpilogueArguments.partial(epilogue, given))
        for kernel in ef.get_kernels(args):
            tile = kernel.plan.spec.name.removeprefix("sm90_gemm_").removesuffix("_2x1")
            if tile in TILES:
                kernel.run(args)
                found = {name: round(times_of(kernel, args, each), 1) for name, each in between.items()}
                rows.append({"epilogue": epilogue.__name__, "tile": tile, "us": found})
                print(rows[-1], flush=True)
    if options.save:
        data = {**machine("cuda"), "shape": [M, N, K], "rows": rows}
        (options.save / "cold_code.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
