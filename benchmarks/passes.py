"""Measure what each graph optimisation gains: the same epilogue with the pass and without it.

python benchmarks/passes.py --rounds 21 --save benchmarks/results/passes.json          on the CPU's panel kernel
python benchmarks/passes.py --device cuda --save benchmarks/results/passes_gpu.json    on Hopper's kernel

Operator fission is for kernels that compute in registers, so it is measured on the GPU only. If a kernel refuses an
epilogue, the reason is printed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import timing
import torch
from timing import machine, paired_ratio, save

import epifuse as ef
from epifuse import passes
from epifuse.base import cache
from epifuse.ir import Graph
from epifuse.kernel import Kernel
from epifuse.providers.cutedsl import lowering
from epifuse.request.problem import Problem
from epifuse.runtime import arguments


def fused(accum: Any, C: Any) -> Any:
    x = accum + C
    D = x * (1 / (1 + ef.exp(-x)))
    return D


def split(accum: Any, C: Any) -> Any:
    x = accum + C
    values, slopes = ef.sum(ef.silu(x), dim=0), ef.sum(ef.dsilu(1.0, x), dim=0)
    return values, slopes


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
    loss = -ef.sum(C * ef.log(p) + (1 - C) * ef.log(1 - p))  # noqa: F841 - prune removes it
    D = p - C
    return D


def gradient_and_loss(accum: Any, C: Any) -> Any:
    p = ef.sigmoid(accum)
    loss = -ef.sum(C * ef.log(p) + (1 - C) * ef.log(1 - p))
    D = p - C
    return D, loss


class Case(NamedTuple):
    """An epilogue, and how it is computed without the pass: as the epilogue `otherwise`; if that is None, with the pass
    left out of the pipeline."""

    epilogue: Callable[..., Any]
    otherwise: Callable[..., Any] | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")


CASES: Mapping[str, Case] = {
    "fuse_operators": Case(fused),
    "split_operators": Case(split, devices=("cuda",)),
    "eliminate_reductions": Case(eliminated, summed),
    "prune": Case(gradient, gradient_and_loss),  # an unused value is never computed, so the other epilogue returns it
}
KERNELS = {"cpu": "cpu_panel", "cuda": "sm90_gemm"}


def left_out(name: str) -> AbstractContextManager[Any]:
    """A context in which the pass is not run. It is a pass of the provider, run after a kernel is chosen, or a pass of
    the pipeline, run before."""
    if hasattr(lowering, name):
        return mock.patch.object(lowering, name, nothing)
    return mock.patch.object(passes, "PIPELINE", tuple(step for step in passes.PIPELINE if step.__name__ != name))


def nothing(graph: Graph, problem: Problem) -> Graph:
    """Return the graph unchanged."""
    return graph


class Bound(NamedTuple):
    """The calls to time, with and without each pass, and by name of a pass why there are none."""

    calls: dict[str, Callable[[], Any]]
    refused: dict[str, str]


def launches(size: int, depth: int, device: str) -> Bound:
    """The calls of every case of a device."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    values = {"A": torch.randn(size, depth) / depth**0.5, "B": torch.randn(depth, size)}
    operands = {
        "C": torch.rand(size, size),
        "onehot": torch.eye(size)[torch.randperm(size)],
        "scale": torch.randn(size, 1),
    }
    here = {name: value.to(dtype).to(device) for name, value in {**values, **operands}.items()}
    found = Bound({}, {})
    for name, case in CASES.items():
        if device not in case.devices:
            continue
        try:
            calls = pair(name, case, here, device)
        except ef.errors.UnsupportedError as error:
            found.refused[name] = str(error)
        else:
            found.calls.update(calls)
    return found


def pair(name: str, case: Case, values: Mapping[str, torch.Tensor], device: str) -> dict[str, Callable[[], Any]]:
    """The calls of a case with its pass and without. Raises `UnsupportedError` if no kernel carries one of the two."""
    made = bound(case.epilogue, values, device)
    if case.otherwise is not None:
        return {name: made, f"without {name}": bound(case.otherwise, values, device)}
    with left_out(name):
        return {name: made, f"without {name}": bound(case.epilogue, values, device)}


def bound(epilogue: Callable[..., Any], values: Mapping[str, torch.Tensor], device: str) -> Callable[[], Any]:
    """A bound launch with its own outputs. Caches are emptied first, so that the present pipeline is used."""
    cache.forget()
    given = {name: values[name] for name in arguments.parsed(epilogue).parameters}
    args = ef.GemmArguments(values["A"], values["B"], epilogue=ef.EpilogueArguments.partial(epilogue, given))
    return kernel_of(args, device).bind(args)


def kernel_of(args: ef.GemmArguments, device: str) -> Kernel:
    """The best kernel of the device's kind. Raises `UnsupportedError` with the reasons if there is none."""
    cc = 90 if device == "cuda" else None
    for kernel in ef.get_kernels(args, cc=cc):
        if kernel.spec.name.startswith(KERNELS[device]):
            return kernel
    reasons = (r.reason for r in ef.explain(args, cc=cc).refusals if r.kernel.startswith(KERNELS[device]))
    raise ef.errors.UnsupportedError("; ".join(dict.fromkeys(reasons)))


def seconds_of(calls: Mapping[str, Callable[[], Any]], rounds: int, device: str) -> Mapping[str, list[float]]:
    """Seconds of each call in each round, interleaved; on a GPU by CUDA events."""
    if device == "cpu":
        return timing.interleave(calls, rounds)
    import gpu_timing

    return gpu_timing.interleave({name: [call] for name, call in calls.items()}, rounds, gpu_timing.Backlog())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--device", choices=KERNELS, default="cpu")
    parser.add_argument("--size", type=int, help="M = N; 2048 on the CPU and 8192 on a GPU")
    parser.add_argument("--depth", type=int, default=64, help="K, small, so that the epilogue is most of the work")
    parser.add_argument("--save", type=Path, help="where the results go, as JSON")
    options = parser.parse_args(argv)
    size = options.size or {"cpu": 2048, "cuda": 8192}[options.device]
    found = launches(size, options.depth, options.device)
    seconds = seconds_of(found.calls, options.rounds, options.device)
    print(f"M = N = {size}, K = {options.depth} on {options.device}; milliseconds, and the ratio with / without")
    rows = {name: row(name, seconds) for name in found.calls if not name.startswith("without ")}
    for name, why in found.refused.items():
        print(f"{name:22} not here: {why}")
    if options.save:
        about = {"machine": machine(options.device), "size": size, "depth": options.depth}
        save(options.save, {**about, "passes": rows, "refused": found.refused})


def row(name: str, seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Print one line of the table, and return it as data."""
    ratio, low, high = paired_ratio(seconds, name, f"without {name}")
    here, there = (statistics.median(seconds[key]) * 1e3 for key in (name, f"without {name}"))
    print(f"{name:22} {here:8.3f} {there:8.3f}   {ratio:.3f} ({low:.3f} to {high:.3f})", flush=True)
    return {
        "with_ms": round(here, 4),
        "without_ms": round(there, 4),
        "ratio": [round(x, 3) for x in (ratio, low, high)],
    }


if __name__ == "__main__":
    main()
