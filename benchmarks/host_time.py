"""Measure the host time of one launch, for each of epifuse's ways to launch and torch.mm(out=), and of a layer's
forward and backward, beside PyTorch's. Nothing waits for the device.

    python benchmarks/host_time.py [--device cuda] [--rounds 50]

On the CPU the time of a layer includes its kernels, because they run in the calling thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from gemm_cases import CASES, Operands
from timing import paired_ratio

import epifuse as ef
from epifuse.pytorch import direct, leaves

SHAPE = (128, 128, 64)  # so small that the device is faster than the host
CALLS = 100  # fewer than the launches that fit in a device's queue
LAYER = (16, 16, 16)


def launches(device: str) -> dict[str, Callable[[], Any]]:
    """The ways to launch the same small product, without and with an epilogue, by name."""
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
    return found | _in_graphs(x, gelu) | _quack(x) if device == "cuda" else found


def _in_graphs(x: Operands, gelu: ef.GemmArguments) -> dict[str, Callable[[], Any]]:
    """The calls in code that Inductor writes for a graph: of a product, and of a leaf. Both allocate the output."""
    from torch._C._dynamo.guards import _empty_strided_cuda as empty

    (m, n), dtype = x.D.shape, x.D.dtype
    spec = leaves.encoded(gelu.call.request.parsed.graph, [leaves.Value("D", dtype, ("m", "n"))])
    leaf = direct.place(spec)
    return {
        "in a graph: mm(out=)": lambda: torch.mm(x.a, x.b, out=empty((m, n), (n, 1), dtype)),  # extern_kernels.mm
        "in a graph: leaf gelu": lambda: leaf(x.a, x.b, [x.bias]),
    }


def _quack(x: Operands) -> dict[str, Callable[[], Any]]:
    try:
        from quack.gemm_interface import gemm
    except ImportError:
        return {}
    return {"quack.gemm": lambda: gemm(x.a, x.b, out=x.D, tuned=False)}


def layers(device: str) -> dict[str, Callable[[], Any]]:
    """A layer with bias and gelu: forward and backward, and forward only."""
    m, n, k = SHAPE if device == "cuda" else LAYER
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, weight, bias = (
        torch.randn(*shape, device=device, dtype=dtype, requires_grad=True) for shape in ((m, k), (n, k), (n,))
    )
    gradient = torch.ones(m, n, device=device, dtype=dtype)

    def fused(save: str) -> torch.Tensor:
        return ef.linear(x, weight, bias, epilogue=ef.gelu, save=save)  # type: ignore[no-any-return]  # one output

    def backward(layer: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def both() -> None:
            layer().backward(gradient)
            x.grad = weight.grad = bias.grad = None

        return both

    forward: dict[str, Callable[[], torch.Tensor]] = {
        EAGER: lambda: F.gelu(F.linear(x, weight, bias)),
        "ef.linear gelu": lambda: fused("recompute"),
        "ef.linear gelu, stored": lambda: fused("preactivation"),
    }
    alone = {f"{name}, forward": call for name, call in forward.items()}
    return {**{name: backward(call) for name, call in forward.items()}, **alone}


EAGER = "F.linear + gelu"


def measure_layers(device: str, rounds: int, calls: int = CALLS) -> dict[str, Any]:
    """Microseconds of a layer by way, and ratios to PyTorch's."""
    seconds = interleave(layers(device), rounds, calls, torch.cuda.synchronize if device == "cuda" else _nothing)
    return {
        "microseconds": {name: round(statistics.median(times) * 1e6, 3) for name, times in seconds.items()},
        "ratios": {
            name: [
                round(x, 4)
                for x in paired_ratio(seconds, name, EAGER + (", forward" if name.endswith("forward") else ""))
            ]
            for name in seconds
            if not name.startswith(EAGER)
        },
    }


def measure(device: str, rounds: int, calls: int = CALLS) -> dict[str, Any]:
    """Microseconds of a call by way, and ratios to torch.mm."""
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
    """Seconds of one call of each way in each round. `drain` waits for the device, which is idle when timing begins."""
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
    """Wait for nothing: the CPU has no queue."""


def main(arguments: list[str] | None = None) -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for title, found in (
        ("a launch", measure(options.device, options.rounds)),
        ("a layer", measure_layers(options.device, options.rounds)),
    ):
        print(title)
        for name, taken in found["microseconds"].items():
            low, high = found["ratios"].get(name, (1.0, 1.0, 1.0))[1:]
            print(f"  {name:34s} {taken:9.2f} us  {found['ratios'].get(name, [1.0])[0]:6.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
