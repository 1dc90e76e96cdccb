"""Fit the constants of the choice of designs (`tuned.py`, `base/processors.py`) to what `shapes.py pick` measured.

    python benchmarks/fit_choice.py benchmarks/results/placed_*.json [--hold FILE ...]

The fit is a coordinate descent. Each constant in turn is multiplied or divided by a step, and the new value is kept if
the choice gets better, until no constant changes. The loss of a product is the logarithm of chosen / best, the ratio of
the times of the chosen and the fastest design, plus a multiple of its square, so that a few large losses count as well.
Its mean over all products is minimised. Needs no GPU. Prints the constants that changed, and for each file, also those
held out, mean, 95th percentile and worst of chosen / best before and after.
For a new GPU, run `shapes.py pick` there, add a row to `base/processors.py`, and run this program.
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
"""Constants that are fitted besides the rates. The costs of whole rows and of longer epilogues are not fitted, because
plain products do not depend on them."""
RATES = ("RATES", "FEW_ROWS_RATES")
STEPS = (1.1, 1.03, 1.01)
_TAIL = 4.0  # the weight of the square


class Case(NamedTuple):
    """A product on the GPU model `word`. `problems` are the problem as it is and with A and B exchanged. `designs` hold
    each design and whether its registers spill; `times` are their microseconds."""

    word: str
    problems: tuple[Problem, Problem]
    designs: tuple[tuple[Design, bool], ...]
    times: tuple[float, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
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
    """Yield the ratio chosen / best of each product, with the present constants."""
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
    """The value that the fit minimises."""
    lost = [math.log(ratio) for ratio in ratios(cases)]
    return sum(one + _TAIL * one * one for one in lost) / len(lost)


def summary(cases: Sequence[Case]) -> str:
    """Mean, 95th percentile and worst of chosen / best, as text."""
    _, mean, most, worst = Summary.of([*ratios(cases)])
    return f"{mean:.4f}, {most:.3f}, {worst:.3f}"


def fit(cases: Sequence[Case]) -> list[tuple[str, float, float]]:
    """Fit the constants. Return those that changed: name, value before, value after.

    The fitted values stay in use in this process.
    """
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
