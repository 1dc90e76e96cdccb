"""Time variants on a GPU, interleaved: a round times each once, so that clocks and heat are the same for all of them.

Each round draws another order, because a variant starts with the power and heat that the one before it leaves. Row sums
of squares at 4096 x 4096 x 4096 take 1.0304 of the plain product's time if they always follow cuBLAS and the plain
product always follows torch.compile, 1.0286 in the reversed order, and 1.0291 if each round draws its order.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gemm_cases import shapes
from timing import command, machine, paired_ratio, save

Calls = Sequence[Callable[[], Any]]
"""One variant: a function for each set of inputs. There are several sets so that no call finds its inputs in L2."""

_SAMPLE = 2e-3  # seconds of work in one sample, because events resolve only half a microsecond
_MOST_REPEATS = 20
_FLUSH_BYTES = 1 << 30


class Backlog:
    """Work that is queued before each sample. It empties the L2 cache, and while it runs, the host gets ahead.

    Without it the measured time of a short kernel would be the host's time to launch it.
    """

    def __init__(self) -> None:
        self.buffer = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.queue(2)
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.queue(4)
        torch.cuda.synchronize()
        self.seconds = (time.perf_counter() - start) / 4

    def queue(self, times: int) -> None:
        """Queue `times` fills of the buffer."""
        for _ in range(times):
            self.buffer.zero_()

    def times(self, host_seconds: float) -> int:
        """The number of fills that take 1.5 times `host_seconds`; the half more is for a slow moment of the host."""
        return 1 + math.ceil(1.5 * host_seconds / self.seconds)


def interleave(variants: Mapping[str, Calls], rounds: int, backlog: Backlog, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of one call of each variant in each round, by CUDA events."""
    host = {name: host_seconds_of(calls, backlog) for name, calls in variants.items()}
    once = {name: sample(calls, 3, backlog, host[name]) for name, calls in variants.items()}
    repeats = repeats_for(min(once.values()))
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    drawn = random.Random(0)
    for round_ in range(warmup + rounds):
        for name in drawn.sample(list(variants), len(variants)):
            measured = sample(variants[name], repeats, backlog, host[name])
            if round_ >= warmup:
                seconds[name].append(measured)
    return seconds


def beside(
    calls: Mapping[str, Callable[[], Any]], base: str, rounds: int, backlog: Backlog
) -> dict[str, dict[str, Any]]:
    """Median microseconds of each call, and ratios to one of them with their 95 % intervals."""
    seconds = interleave({name: [call] for name, call in calls.items()}, rounds, backlog)
    return {
        "microseconds": {name: round(statistics.median(times) * 1e6, 2) for name, times in seconds.items()},
        "ratios": {name: [round(x, 4) for x in paired_ratio(seconds, name, base)] for name in seconds if name != base},
    }


def that_run(calls: Mapping[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """Run each call once. Return those that run; print the error of the others and leave them out."""
    able = {}
    for name, call in calls.items():
        try:
            call()
            able[name] = call
        except Exception as error:
            print(f"  {name}: {error!r}"[:300], flush=True)
    return able


def told(row: Mapping[str, Any]) -> str:
    """The result of `beside` as two lines of text."""
    times = ", ".join(f"{name} {time}" for name, time in row["microseconds"].items())
    return f"{times}\n  beside the first: " + ", ".join(f"{name} {x[0]}" for name, x in row["ratios"].items())


def timed(row: Mapping[str, Any], kernel: Callable[[Any], str] = str) -> str:
    """The times and ratios of a row that has `kernels`, as lines of text. `kernel` makes text of one of `kernels`."""
    kernels = {name: kernel(found) for name, found in row["kernels"].items()}
    times = [f"  {name}: {time} us, {kernels.get(name, 'PyTorch')}" for name, time in row["microseconds"].items()]
    ratios = "  " + ", ".join(f"{pair} {middle}" for pair, (middle, _, _) in row["ratios"].items())
    return "\n".join(["x".join(map(str, row["shape"])), *times, ratios])


def parser_of(about: str | None, default: str | None = None) -> argparse.ArgumentParser:
    """The argument parser of a benchmark on a GPU. `default` are its default shapes; None if it takes no shapes."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if default is not None:
        parser.add_argument("--shapes", type=shapes, default=shapes(default))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", type=Path)
    return parser


def measured(
    options: argparse.Namespace,
    places: Iterable[tuple[Any, ...]],
    measure: Callable[..., dict[str, Any]],
    told: Callable[[dict[str, Any]], str],
    before: Callable[[int, Backlog], Mapping[str, Any]] = lambda rounds, backlog: {},
) -> int:
    """Measure a row for each place by `measure(*place, rounds, backlog)`, and return an exit status.

    Each row is printed with `told` and saved with all rows before it, so that a run that ends early keeps its rows.
    `before` measures what belongs to all rows.
    """
    backlog, rows = Backlog(), []
    results = {**machine("cuda"), "command": command(sys.argv), "rounds": options.rounds}
    results |= {**before(options.rounds, backlog), "rows": rows}
    for place in places:
        rows.append(measure(*place, options.rounds, backlog))
        print(told(rows[-1]), flush=True)
        if options.save:
            save(options.save, results)
    return 0


def repeats_for(seconds: float) -> int:
    """The number of calls in one sample, the same for every variant. `seconds` is the shortest time of a call."""
    return min(max(math.ceil(_SAMPLE / max(seconds, 1e-9)), 2), _MOST_REPEATS)


def host_seconds_of(calls: Calls, backlog: Backlog) -> float:
    """The host's seconds for one call. It is the median of later calls, because the first ones build things."""
    taken = []
    for call in [*calls, *calls, *calls, *calls][:12]:
        backlog.queue(1)
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    return statistics.median(taken[len(taken) // 2 :])


def sample(calls: Calls, repeats: int, backlog: Backlog, host_seconds: float) -> float:
    """Seconds of one call, from `repeats` calls in a row. `host_seconds` is the host's time for one."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    backlog.queue(backlog.times(repeats * host_seconds))
    start.record()
    for index in range(repeats):
        calls[index % len(calls)]()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / repeats
