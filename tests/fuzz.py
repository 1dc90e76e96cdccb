"""`python tests/fuzz.py --n 10000`: random epilogues, the coverage they reached, and each failure cut down to its core.

`--seed 1234` runs one case again and prints it. Ends with 1 for a mismatch, or where a cell of the table was met less
often than 30 times in every 10,000 cases; fewer cases than that are too few to tell.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

from fuzzing import case, check, coverage, shrink  # noqa: E402 - found through the path set above

_CHUNK = 50


class Found(NamedTuple):
    """What a run of seeds gave: cells met, elements judged of all, and seeds that failed with why."""

    counts: Counter[coverage.Cell]
    judged: int
    total: int
    failures: list[tuple[int, str]]


def run(seeds: range) -> Found:
    """Every seed once."""
    met = coverage.Coverage()
    found = Found(met.counts, 0, 0, [])
    for seed in seeds:
        try:
            report = check.run(case.make(seed))
        except Exception as error:  # whatever it is, it is a finding
            found.failures.append((seed, f"{type(error).__name__}: {error}"))
            continue
        met.add(report.args)
        found = found._replace(judged=found.judged + report.judged, total=found.total + report.total)
    return found


def _alone() -> None:
    torch.set_num_threads(1)


def _chunks(start: int, count: int) -> list[range]:
    return [range(i, min(i + _CHUNK, start + count)) for i in range(start, start + count, _CHUNK)]


def run_all(start: int, count: int, jobs: int) -> Iterator[Found]:
    """In `jobs` processes of one thread each."""
    if jobs == 1:
        _alone()
        yield from map(run, _chunks(start, count))
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _alone) as pool:
        yield from pool.imap_unordered(run, _chunks(start, count))


def show(seed: int) -> None:
    """A case, its failure if it has one, and the least part of it that still fails."""
    made = case.make(seed)
    print(made)
    try:
        check.run(made)
    except Exception as error:
        print(f"{type(error).__name__}: {error}\n\nthe least that still fails:\n{shrink.smallest(made)}")
        raise SystemExit(1) from error
    print("passes")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    if options.seed is not None:
        show(options.seed)
        return 0
    began, met, judged, total, failures = time.perf_counter(), coverage.Coverage(), 0, 0, []
    for found in run_all(options.start, options.n, options.jobs):
        met.counts.update(found.counts)
        judged, total, failures = judged + found.judged, total + found.total, failures + found.failures
    seconds = time.perf_counter() - began
    print(met.table())
    wanted = coverage.WANTED * (options.n // coverage.PER)
    missed = met.short_of(wanted)
    for hole in list(coverage.holes(missed))[:20]:
        print(f"met less than {wanted} times: {hole}")
    print(f"{options.n} cases in {seconds:.0f} s ({options.n / seconds:.0f}/s), {len(failures)} failed")
    print(f"{judged / max(total, 1):.1%} of {total} elements judged")
    print(f"{len(coverage.CELLS) - len(missed)} of {len(coverage.CELLS)} cells met {wanted} times or more")
    for seed, why in failures:
        print(f"\n--seed {seed}\n{why}")
    return 1 if failures or missed else 0


if __name__ == "__main__":
    sys.exit(main())
