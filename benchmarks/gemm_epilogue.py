"""Compare the GPU speed of fused epilogues with cuBLAS, cuBLASLt, torch.compile and QuACK, interleaved in one run.

python benchmarks/gemm_epilogue.py --save results.json --chart results.png     measure all, some minutes on an H200
python benchmarks/gemm_epilogue.py --peers cuBLAS,QuACK --shapes 4096x4096x4096 --cases plain,gelu
python benchmarks/gemm_epilogue.py --cases softmax,rmsnorm --peers torch.compile         whole rows
python benchmarks/gemm_epilogue.py --host                                      only the host time of a launch
python benchmarks/gemm_epilogue.py --check [FILE]                              which figures of a file hold
python benchmarks/gemm_epilogue.py --publish [FILE]                            tables of pages and the chart from a file
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gemm_report
import torch
from gemm_cases import CASES, COMPILED, Case, Operands, shapes
from timing import command, machine, paired_ratio, save

from epifuse import providers

HOME = Path(__file__).parent
RESULTS = HOME / "results" / "gemm_epilogue.json"
PEERS = tuple(dict.fromkeys([*(name for case in CASES for name in case.peers), *COMPILED]))
SLOW_TO_COMPILE = "max-autotune"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, check or publish. The exit status is not 0 if a figure fails."""
    options = _options(argv)
    if options.publish is not None:
        _publish(json.loads(options.publish.read_text()))
        return 0
    if options.check is not None:
        return _check(json.loads(options.check.read_text()))
    if not torch.cuda.is_available():
        print("this measures GPUs, and there is none here; --check and --publish work on saved results")
        return 2
    results = measure(options)
    if options.save:
        save(options.save, results)
    if options.chart:
        gemm_report.chart(results, options.chart)
    return _check(results)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--shapes", type=shapes, default=None, help="as in 4096x4096x4096,64x14336x4096")
    parser.add_argument("--cases", type=_among(case.name for case in CASES), default=None)
    parser.add_argument("--peers", type=_among(PEERS), default=None, help=f"of {', '.join(PEERS)}; none: --peers=")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds after which max-autotune is left out")
    parser.add_argument("--host", action="store_true", help="only the host time of a launch")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--chart", type=Path)
    parser.add_argument("--check", type=Path, nargs="?", const=RESULTS)
    parser.add_argument("--publish", type=Path, nargs="?", const=RESULTS)
    return parser.parse_args(argv)


def _among(known: Any) -> Callable[[str], tuple[str, ...]]:
    names = tuple(known)

    def parse(text: str) -> tuple[str, ...]:
        given = tuple(filter(None, text.split(",")))
        if unknown := [name for name in given if name not in names]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not one of {', '.join(names)}")
        return given

    return parse


# --- measuring ---------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every row, and the host time of a launch."""
    import host_time

    started = time.monotonic()
    results = _header(options)
    if not options.host:
        from gpu_timing import Backlog

        backlog = Backlog()
        wanted = [case for case in CASES if options.cases is None or case.name in options.cases]
        for shape in options.shapes or dict.fromkeys(shape for case in wanted for shape in case.shapes):
            sets = _input_sets(*shape)
            for case in (case for case in wanted if options.shapes or shape in case.shapes):
                results["rows"].append(_row(case, sets, options, backlog, started))
                _progress(results["rows"][-1], started)
            del sets
            torch.cuda.empty_cache()
            if options.save:
                save(options.save, results)  # so that a later failure loses no row
    results["host"] = host_time.measure("cuda", options.rounds)
    print("host", results["host"]["microseconds"], flush=True)
    results["seconds"] = round(time.monotonic() - started, 1)
    return results


def _header(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.cuda.get_device_properties(0)
    return {
        "device": device.name,
        "multiprocessors": device.multi_processor_count,
        **machine(),
        "versions": {name: _version(name) for name in ("torch", "triton", "nvidia-cutlass-dsl", "quack-kernels")},
        "cuda": torch.version.cuda,
        "import_seconds": _import_seconds(),  # once a process; not part of a kernel's compile time
        "command": command(sys.argv),
        "rounds": options.rounds,
        "rows": [],
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_seconds() -> float | None:
    """The time that importing the compiler of the GPU kernels takes; None if it is missing."""
    start = time.perf_counter()
    try:
        providers.load("cutedsl").prepare()
    except ImportError:
        return None
    return round(time.perf_counter() - start, 2)


_FOOTPRINT = 4 * 60 << 20  # four times the L2 cache of an H200
_MOST_SETS = 8


def _input_sets(m: int, n: int, k: int) -> list[Operands]:
    """Make so many sets of inputs that no call finds its own in the L2 cache."""
    torch.manual_seed(0)
    count = min(max(-(-_FOOTPRINT // (2 * (m * k + k * n))), 1), _MOST_SETS)
    return [Operands.random(m, n, k) for _ in range(count)]


def _row(case: Case, sets: list[Operands], options: argparse.Namespace, backlog: Any, started: float) -> dict[str, Any]:
    import gemm_variants
    from gpu_timing import interleave

    def afford(name: str) -> bool:
        return name != SLOW_TO_COMPILE or time.monotonic() - started < options.budget

    made = gemm_variants.build(case, sets, options.peers, afford)
    seconds = interleave(made.calls, options.rounds, backlog) if made.calls else {}
    own = gemm_variants.EPIFUSE
    return {
        "case": case.name,
        "shape": [*sets[0].a.shape[:1], sets[0].b.shape[1], sets[0].a.shape[1]],
        "kernel": made.kernel,
        "peers": made.peers,
        "microseconds": {name: round(statistics.median(times) * 1e6, 2) for name, times in seconds.items()},
        "ratios": {
            name: [round(x, 4) for x in paired_ratio(seconds, own, name)]
            for name in seconds
            if own in seconds and name != own
        },
        "errors": made.errors,
        "skipped": made.skipped,
    }


def _progress(row: dict[str, Any], started: float) -> None:
    shape = "x".join(map(str, row["shape"]))
    times = ", ".join(f"{name} {time:.1f}" for name, time in row["microseconds"].items())
    print(
        f"[{time.monotonic() - started:5.0f} s] {row['case']} {shape} {row['kernel'].get('name')}: {times}", flush=True
    )
    for name, reason in row["skipped"].items():
        print(f"           {name} left out: {reason}", flush=True)


# --- reporting ---------------------------------------------------------------------------------------------------


def _check(results: dict[str, Any]) -> int:
    found = gemm_report.verdicts(results)
    print(*found, sep="\n", flush=True)
    return 0 if all(verdict.holds for verdict in found) else 1


def _publish(results: dict[str, Any]) -> None:
    save(RESULTS, results)
    gemm_report.chart(results, RESULTS.with_suffix(".png"))
    gemm_report.first_chart(results, RESULTS.with_name("first_screen.png"))
    for name in gemm_report.PAGES:
        page = HOME.parent / name
        page.write_text(gemm_report.inserted(page.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
