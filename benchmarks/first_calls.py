"""Measure how long calls with an M that was not seen before take on the host.

A process with an empty store of kernels calls with 400 random M; further processes then do the same with that store.

    python benchmarks/first_calls.py [--save FILE] [--processes 3]

Each figure is the host's time of one `ef.linear` with the epilogue of `planning_time.py`. Python's garbage collector
may run during any call, so the longest time is given with and without the collector's time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from planning_time import cases
from timing import machine, save

import epifuse as ef

CALLS = 400


def one_process() -> dict[str, Any]:
    """Measure in this process. Return the figures, in milliseconds."""
    case = cases("cuda")["gelu + bias + residual"]
    dtype, k = case.scale.dtype, case.scale.size
    torch.zeros(1, device="cuda")
    weight = torch.zeros(case.n, k, dtype=dtype, device="cuda")
    collecting: list[float] = []

    def collected(phase: str, _: Any) -> None:
        now = time.perf_counter()
        collecting.append(-now if phase == "start" else collecting.pop() + now)

    gc.callbacks.append(collected)
    calls = []
    for m in [random.Random(seed).randrange(1, 8193) for seed in range(CALLS)]:
        x, operands = torch.zeros(m, k, dtype=dtype, device="cuda"), case.operands(m, "cuda")
        torch.zeros(m, case.n, dtype=dtype, device="cuda")
        torch.cuda.synchronize()
        collecting.clear()
        start = time.perf_counter()
        ef.linear(x, weight, epilogue=case.epilogue, **operands)
        calls.append(((time.perf_counter() - start) * 1e3, sum(collecting) * 1e3))
    others = calls[1:]
    return {
        "first": round(calls[0][0], 1),
        "largest of the others": round(max(taken for taken, _ in others), 2),
        "largest without the collector": round(max(taken - by_collector for taken, by_collector in others), 2),
        "collector's longest": round(max(by_collector for _, by_collector in others), 2),
        "median": round(statistics.median(taken for taken, _ in others), 3),
        "compiler imported": "cutlass" in sys.modules,
    }


def main() -> int:
    """Run the command line. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_process()))
        return 0
    rows = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "EPIFUSE_CACHE_DIR": folder}
        for _ in range(options.processes):
            command = [sys.executable, __file__, "--one"]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
    if options.save:
        save(options.save, {**machine("cuda"), "unit": "ms", "calls": CALLS, "processes": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
