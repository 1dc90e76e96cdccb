"""Compare the speed and memory of fused epilogues on the CPU with eager PyTorch and torch.compile, interleaved.

python benchmarks/cpu_epilogue.py [--rounds 21] [--save benchmarks/results/cpu_epilogue.json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import command, interleave, machine, paired_ratio, save

import epifuse as ef
from epifuse.tools.debug import peak_bytes

M = N = 4096
K = 256


def four_operations(accum, C, E):
    """Four elementwise operations on two full operands."""
    return (accum * 2.0 + C) * E - 1.0


def eight_operations(accum, C, E):
    """Eight elementwise operations, two of them activations, on two full operands."""
    t = accum * 1.5 + C * 0.5
    u = ef.relu(t) * E
    return ef.sigmoid(u) + t * 0.25


def measure(epilogue: Callable[..., Any], dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Measure one epilogue in one dtype: milliseconds, paired ratios, and the memory of intermediate values."""
    torch.manual_seed(0)
    a, b = torch.randn(M, K, dtype=dtype), torch.randn(K, N, dtype=dtype)
    c, e = torch.randn(M, N, dtype=dtype), torch.randn(M, N, dtype=dtype)
    function = ef.reference(epilogue)
    compiled = torch.compile(lambda a, b, c, e: function(a @ b, c, e), dynamic=False)
    variants: dict[str, Callable[[], Any]] = {
        "eager": lambda: function(a @ b, c, e),
        "torch.compile": lambda: compiled(a, b, c, e),
        "epifuse": lambda: ef.gemm(a, b, epilogue=epilogue, C=c, E=e),
        "product alone": lambda: a @ b,
    }
    seconds = interleave(variants, rounds)
    result_bytes = M * N * a.element_size()
    # The result is not an intermediate value. The accumulator is one, and eager PyTorch stores it.
    intermediates = {name: peak_bytes(variants[name]) - result_bytes for name in ("eager", "epifuse")}
    return {
        "epilogue": epilogue.__name__,
        "dtype": str(dtype).removeprefix("torch."),
        "milliseconds": {name: round(statistics.median(times) * 1e3, 2) for name, times in seconds.items()},
        "ratio to eager": [round(x, 3) for x in paired_ratio(seconds, "epifuse", "eager")],
        "ratio to torch.compile": [round(x, 3) for x in paired_ratio(seconds, "epifuse", "torch.compile")],
        "intermediate megabytes": {name: round(size / 1e6, 2) for name, size in intermediates.items()},
    }


def main() -> None:
    """Measure and print; save if `--save` is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for epilogue in (four_operations, eight_operations):
            rows.append(measure(epilogue, dtype, options.rounds))
            print(rows[-1], flush=True)
    if options.save:
        save(
            options.save,
            {"machine": machine(), "command": command(sys.argv), "problem": {"M": M, "N": N, "K": K}, "rows": rows},
        )


if __name__ == "__main__":
    main()
