"""Compare the host time of a call through each front end: the same epilogue on the same small tensors.

python benchmarks/front_ends.py --rounds 2000 --save benchmarks/results/front_ends.json
python benchmarks/front_ends.py --device cuda          launches of Hopper's kernel; nothing waits for the device

The tensors are so small that nearly all of the time is the host's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timing import interleave, machine, paired_ratio, save

import epifuse as ef
from epifuse.forms import thread
from epifuse.forms.evt import EVT, AccFetch, Compute, ScalarBroadcast, SrcFetch


def function(accum: Any, C: Any, alpha: Any, beta: Any) -> Any:
    D = ef.relu(alpha * accum + beta * C)
    return D


class ReluGemm(ef.DenseGemm):
    def epilogue_operation(self, accumulator: Any, c: Any, alpha: float, beta: float) -> Any:
        return ef.relu(accumulator * alpha + c * beta)


def variants(size: int, device: str) -> Mapping[str, Callable[[], Any]]:
    """Calls by name, with alpha 2 and beta 0.5. The others are compared with the first."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    A, B, C = (torch.randn(size, size).to(dtype).to(device) for _ in range(3))
    scaled = EVT(Compute(ef.mul), ScalarBroadcast("alpha"), AccFetch())
    tree = EVT(
        Compute(ef.relu), EVT(Compute(ef.add), scaled, EVT(Compute(ef.mul), ScalarBroadcast("beta"), SrcFetch()))
    )
    functor = thread.LinearCombinationRelu(alpha=2.0, beta=0.5)
    dense, plan = ReluGemm(device=device), ef.Gemm(element=dtype)
    plan.activation = ef.relu
    return {
        "function": lambda: ef.gemm(A, B, epilogue=function, C=C, alpha=2.0, beta=0.5),
        "visitor tree": lambda: ef.gemm(A, B, epilogue=tree, C=C, alpha=2.0, beta=0.5),
        "thread functor": lambda: ef.gemm(A, B, epilogue=functor, C=C),
        "class": lambda: dense.run(A, B, C, alpha=2.0, beta=0.5),
        "plan object": lambda: plan.run(A, B, C, alpha=2.0, beta=0.5),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", type=int, default=16, help="M = N = K")
    parser.add_argument("--save", type=Path, help="where the results go, as JSON")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    calls = variants(options.size, options.device)
    seconds = interleave(calls, options.rounds, warmup=50)
    base, *_ = calls
    rows = {}
    for name in calls:
        ratio, low, high = paired_ratio(seconds, name, base)
        microseconds = statistics.median(seconds[name]) * 1e6
        rows[name] = {"microseconds": microseconds, "ratio": ratio, "low": low, "high": high}
        print(f"{name:<16} {microseconds:7.1f} us a call, {ratio:.3f} x {base} ({low:.3f} to {high:.3f})")
    if options.save:
        about = {"machine": machine(options.device), "rounds": options.rounds, "size": options.size}
        save(options.save, {**about, "calls": rows})


if __name__ == "__main__":
    main()
