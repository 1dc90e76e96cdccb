"""What the host pays for one launch: epifuse's ways to launch beside torch.mm(out=). Nothing waits for the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from gemm_cases import CASES, Operands
from timing import paired_ratio

import epifuse as ef

SHAPE = (128, 128, 64)  # the device is done before the host is
CALLS = 100  # fewer than the launches a device queues


def launches(device: str) -> dict[str, Callable[[], Any]]:
    """The ways to launch the same small product, and one with an epilogue."""
    x = Operands.random(*SHAPE, device=device)
    plain, gelu = (case.arguments(x) for case in CASES[:2])
    kernel, fused = ef.get_kernels(plain)[0], ef.get_kernels(gelu)[0]
    artifact, fused_artifact = kernel.compile(plain), fused.compile(gelu)
    found: dict[str, Callable[[], Any]] = {
        "torch.mm": lambda: torch.mm(x.a, x.b, out=x.D),
        "kernel.run": lambda: kernel.run(plain, compiled_artifact=artifact),
        "bound": kernel.bind(plain),
        "ef.gemm": lambda: ef.gemm(x.a, x.b),
        "ef.gemm out": lambda: ef.gemm(x.a, x.b, out=x.D),
        "kernel.run gelu": lambda: fused.run(gelu, compiled_artifact=fused_artifact),
        "bound gelu": fused.bind(gelu),
        "ef.gemm gelu": lambda: ef.gemm(x.a, x.b, epilogue=CASES[1].epilogue, bias=x.bias),
        "GemmArguments gelu": lambda: CASES[1].arguments(x),
    }
    return found | _quack(x) if device == "cuda" else found


def _quack(x: Operands) -> dict[str, Callable[[], Any]]:
    try:
        from quack.gemm_interface import gemm
    except ImportError:
        return {}
    return {"quack.gemm": lambda: gemm(x.a, x.b, out=x.D, tuned=False)}


def measure(device: str, rounds: int, calls: int = CALLS) -> dict[str, Any]:
    """Microseconds of a call, and ratios to torch.mm, by way."""
    seconds = interleave(launches(device), rounds, calls, torch.cuda.synchronize if device == "cuda" else _nothing)
    return {
        "shape": list(SHAPE),
        "calls": calls,
        "microseconds": {name: round(statistics.median(times) * 1e6, 3) for name, times in seconds.items()},
        "ratios": {
            name: [round(x, 4) for x in paired_ratio(seconds, name, "torch.mm")]
            for name in seconds
            if name != "torch.mm"
        },
    }


def interleave(
    ways: Mapping[str, Callable[[], Any]], rounds: int, calls: int, drain: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of one call in each round; the device is idle when a round begins."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 2):
        for name, call in ways.items():
            call()
            drain()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            taken = (time.perf_counter() - start) / calls
            drain()
            if round_ >= 2:
                seconds[name].append(taken)
    return seconds


def _nothing() -> None:
    """The CPU has no queue."""
