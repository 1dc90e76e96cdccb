"""Compare source trees on one GPU, to find out whether a change to the kernels makes them faster.

    git worktree add /tmp/before HEAD
    python benchmarks/compare_trees.py before=/tmp/before/src after=src --cases plain,gelu --shapes 8192x8192x512

Each tree has its own process, which builds its kernels, checks their results, and times a sample on request. The
processes take turns, so that clocks and heat are the same for all. Figures of different runs on one GPU differ by
several percent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import gemm_variants
import torch
from gemm_cases import CASES, Operands, shapes
from gpu_timing import Backlog, host_seconds_of, repeats_for, sample
from timing import machine, paired_ratio, save

import epifuse as ef

HOME = Path(__file__).parent
Shape = tuple[int, int, int]
Ask = Callable[[str, Shape], Any]
"""Asks a tree's process about a case at a shape. The first answer is the name of the kernel, or "failed: ..." if there
is none. Each later answer is the seconds of one call."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print, save. The exit status is not 0 if a tree has no kernel for a case."""
    options = _options(argv)
    if options.serve:
        return _serve(options.serve)
    work = [(case, shape) for shape in options.shapes for case in options.cases]
    processes = {name: _process(source) for name, source in options.trees.items()}
    trees = {name: _asking(process) for name, process in processes.items()}
    try:
        with ThreadPoolExecutor() as pool:  # all trees build at once, because building takes longer than timing
            built = dict(zip(trees, pool.map(lambda ask: [ask(*each) for each in work], trees.values()), strict=True))
        rows = []
        for i, (case, shape) in enumerate(work):
            row = {"case": case, "shape": list(shape), "kernels": {name: kernels[i] for name, kernels in built.items()}}
            if not any("failed" in kernel for kernel in row["kernels"].values()):
                row |= compare({name: partial(ask, case, shape) for name, ask in trees.items()}, options.rounds)
            rows.append(row)
            print(_line(row), flush=True)
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    if options.save:
        save(options.save, {**machine("cuda"), "rounds": options.rounds, "trees": list(options.trees), "rows": rows})
    return int(any("seconds" not in row for row in rows))


def compare(trees: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 2) -> dict[str, Any]:
    """Median seconds of each tree, and ratios to those of the first tree with their intervals. The trees take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in trees}
    for round_ in range(warmup + rounds):
        for name, ask in trees.items():
            taken = ask()
            if round_ >= warmup:
                seconds[name].append(taken)
    first = next(iter(trees))
    return {
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "ratios": {name: [round(x, 4) for x in paired_ratio(seconds, name, first)] for name in trees},
    }


def _line(row: Mapping[str, Any]) -> str:
    shape = "x".join(map(str, row["shape"]))
    if "seconds" not in row:
        return f"{row['case']} {shape}: {row['kernels']}"
    times = (f"{name} {time * 1e6:.1f} us {row['ratios'][name][0]:.3f}" for name, time in row["seconds"].items())
    return f"{row['case']} {shape}: {', '.join(times)}"


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", metavar="NAME=SRC", help="a name, and the folder that holds epifuse/")
    parser.add_argument("--cases", type=lambda text: tuple(text.split(",")), default=("plain", "gelu"))
    parser.add_argument("--shapes", type=shapes, default=((8192, 8192, 512), (4096, 4096, 4096)))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    pairs = [text.partition("=") for text in options.trees]
    options.trees = {name: Path(source) for name, _, source in pairs}
    missing = [name for name, source in options.trees.items() if not (source / "epifuse" / "__init__.py").exists()]
    if not options.serve and (missing or not pairs or len(options.trees) != len(pairs)):
        parser.error(
            f"each tree needs its own name and a folder that holds epifuse/: {' '.join(missing or argv or [])}"
        )
    return options


# --- a tree's process -------------------------------------------------------------------------------------------


def _process(source: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(source.resolve()), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HOME / "compare_trees.py"), "--serve", str(source.resolve())]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _asking(process: subprocess.Popen[str]) -> Ask:
    def ask(case: str, shape: Shape) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([case, shape]) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    return ask


def _serve(source: Path) -> int:
    """Answer each line of the input. Other output goes to stderr, so that no library prints between the answers."""
    assert Path(ef.__file__).is_relative_to(source), f"{ef.__file__} is not of {source}"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    known: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        case, shape = json.loads(line)
        answer = known[line]() if line in known else _prepared(known, line, case, shape)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


_BACKLOG = cache(Backlog)


def _prepared(known: dict[str, Callable[[], float]], line: str, name: str, shape: list[int]) -> str:
    """Build one case, check its result, and store in `known` the function that times it.

    Return the kernel's name, or "failed: ..." if there is none.
    """
    torch.manual_seed(0)
    built: dict[str, Any] = {}
    try:
        case = next(case for case in CASES if case.name == name)
        sets = [Operands.random(*shape) for _ in range(2)]
        calls = gemm_variants.fused(case, sets, built)
        gemm_variants.compare(calls[0](), gemm_variants.reference(case, sets[0]))
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    backlog = _BACKLOG()
    host = host_seconds_of(calls, backlog)
    repeats = repeats_for(sample(calls, 3, backlog, host))
    known[line] = lambda: sample(calls, repeats, backlog, host)
    return str(built["name"])


if __name__ == "__main__":
    sys.exit(main())
