"""Fit the constants of the choice of designs (`tuned.py`, `base/processors.py`) to what `shapes.py pick` measured.

    python benchmarks/fit_choice.py benchmarks/results/placed_*.json [--hold FILE ...]

Coordinate descent: each constant in turn is multiplied by a step, and keeps what makes the choice better, until nothing
does. What it minimises is the mean over all products of how much longer the chosen design takes than the fastest one,
the square of it beside, so that a few products that lose much count as well. Needs no GPU. Prints the constants that
changed, and mean, 95th percentile and worst of chosen / best by file before and after, for files that are held out too.
For a new GPU: `shapes.py pick` there, a row in `base/processors.py`, and this.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import track
from shapes import model, picked
from shapes_report import Summary

from epifuse.base import processors
from epifuse.providers.cutedsl import heuristic, swap, tuned
from epifuse.providers.cutedsl.design import Design
from epifuse.request.problem import Problem

FITTED = (
    "WAVE_HIDDEN",
    "CLUSTER_LAUNCH",
    "L2_EXPOSED",
    "MERGED",
    "TWO_LINES",
    "SUM_READ",
    "SUM_WRITTEN",
    "HANDED_OVER",
)
"""Beside the rates. What plain products say nothing of stays: what whole rows and longer epilogues cost."""
RATES = ("RATES", "FEW_ROWS_RATES")
STEPS = (1.1, 1.03, 1.01)
_TAIL = 4.0  # of the square, beside the mean


class Case(NamedTuple):
    """A product on a GPU, as it is and exchanged; its designs, whether their registers spill, and microseconds."""

    word: str
    problems: tuple[Problem, Problem]
    designs: tuple[tuple[Design, bool], ...]
    times: tuple[float, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--hold", type=Path, nargs="*", default=[], help="files that are not fitted to")
    options = parser.parse_args(argv)
    fitted = [path for path in options.files if path not in options.hold]
    cases = {path: cases_of(json.loads(path.read_text())) for path in track([*fitted, *options.hold], "reading")}
    told = {path: [summary(own)] for path, own in cases.items()}
    own = [case for path in fitted for case in cases[path]]
    for name, before, after in fit(own):
        print(f"{name}: {before:.4g} -> {after:.4g}")
    for path, found in told.items():
        held = " (held out)" if path in options.hold else ""
        print(f"{path.name}{held}: {found[0]} -> {summary(cases[path])}")
    return 0


def cases_of(saved: Mapping[str, Any]) -> list[Case]:
    """The products of a file that `shapes.py pick` wrote."""
    found = []
    for _, plans in picked(saved):
        problem = next(iter(plans)).problem
        designs = tuple((plan.allocation.program.design, plan.allocation.program.spills) for plan in plans)
        found.append(Case(model(saved), (problem, swap.problem_of(problem)), designs, tuple(plans.values())))
    return found


def ratios(cases: Sequence[Case]) -> Iterator[float]:
    """Chosen / best of each product, with the constants as they are."""
    rated: dict[tuple[str, Design, bool], heuristic.Rated] = {}
    for word, problems, designs, times in cases:
        costs = []
        for design, spills in designs:
            key = word, design, spills
            if key not in rated:
                processor = processors.GPUS[word]
                rated[key] = heuristic.Rated.of(design, processor, 0, moving=0, shares_rows=False, spills=spills)
            costs.append(heuristic.cost(rated[key], problems[design.swapped]))
        yield times[costs.index(min(costs))] / min(times)


def loss(cases: Sequence[Case]) -> float:
    """What is minimised."""
    lost = [math.log(ratio) for ratio in ratios(cases)]
    return sum(one + _TAIL * one * one for one in lost) / len(lost)


def summary(cases: Sequence[Case]) -> str:
    """Mean, 95th percentile, worst."""
    _, mean, most, worst = Summary.of([*ratios(cases)])
    return f"{mean:.4f}, {most:.3f}, {worst:.3f}"


def fit(cases: Sequence[Case]) -> list[tuple[str, float, float]]:
    """Constants by name, before and after; they stay as fitted in this process."""
    rates = [_of_rates(name, key) for name in RATES for key in getattr(tuned, name).value]
    constants = [*map(_of_tuned, FITTED), *rates, *map(_of_l2, processors.GPUS)]
    before, least = [get() for _, get, _ in constants], loss(cases)
    for step in STEPS:
        better = True
        while better:
            better = False
            for _, get, set_to in track(constants, f"{loss(cases):.5f}, steps of {step}"):
                own = get()
                for factor in (step, 1 / step):
                    set_to(own * factor)
                    if (found := loss(cases)) < least - 1e-7:
                        least, better = found, True
                        break
                    set_to(own)
    return [(name, was, get()) for (name, get, _), was in zip(constants, before, strict=True) if get() != was]


Constant = tuple[str, Callable[[], float], Callable[[float], None]]


def _of_tuned(name: str) -> Constant:
    def set_to(value: float) -> None:
        setattr(tuned, name, replace(getattr(tuned, name), value=value))

    return name, lambda: float(getattr(tuned, name).value), set_to


def _of_rates(name: str, key: Any) -> Constant:
    def set_to(value: float) -> None:
        held = getattr(tuned, name)
        setattr(tuned, name, replace(held, value={**held.value, key: value}))

    return f"{name} {key}", lambda: float(getattr(tuned, name).value[key]), set_to


def _of_l2(word: str) -> Constant:
    def set_to(value: float) -> None:
        processors.GPUS[word] = processors.GPUS[word]._replace(l2_bytes_a_second=value)

    return f"l2_bytes_a_second of {word}", lambda: processors.GPUS[word].l2_bytes_a_second, set_to


if __name__ == "__main__":
    sys.exit(main())
