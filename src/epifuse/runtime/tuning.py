"""Tuning: compile every kernel that can run a problem, time all of them, and store which is fastest on disk.

Kernels are timed on new tensors with random values, so no tensor of the caller is written.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from epifuse.base.config import CONFIG
from epifuse.base.errors import EpifuseError
from epifuse.plan import Plan, Selection
from epifuse.request.signature import Call, with_infos
from epifuse.runtime import tuned
from epifuse.runtime.background import is_capturing
from epifuse.runtime.launch import Prepared, destinations, outputs_of, require_data
from epifuse.runtime.precompile import compile_ahead, is_watched
from epifuse.runtime.timing import in_turn, median, random_like
from epifuse.runtime.tuned import Found

_MEASURING = threading.Lock()  # kernels timed at the same time would slow each other down


def _renew_lock() -> None:
    global _MEASURING
    _MEASURING = threading.Lock()


if hasattr(os, "register_at_fork"):  # another thread may hold the lock during a fork
    os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True)
class Fastest:
    """The fastest kernel for one problem, and the microseconds of each. `found` says whether it was found on disk."""

    problem: str
    kernel: str
    microseconds: Mapping[str, float]
    found: bool = False

    def __str__(self) -> str:
        shown = f"{self.problem}: {self.kernel}, {self.microseconds[self.kernel]:.4g} us"
        return f"{shown}, the fastest of {len(self.microseconds)}{', found on disk' if self.found else ''}"


@dataclass(frozen=True)
class Tuned:
    """The result of `tune`, with the problems in order. It is true if nothing failed.

    `failed` are problems that no kernel can run, and kernels that could not be timed, each with the reason.
    """

    results: tuple[Fastest, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return not self.failed

    def __str__(self) -> str:
        lines = [*map(str, self.results), *([f"{len(self.failed)} failed:"] if self.failed else [])]
        return "\n".join([*lines, *(f"  {name}: {why}" for name, why in self.failed)])


# --- choosing by what was measured ------------------------------------------------------------------------------------


def known(selection: Selection) -> Selection:
    """The selection with the kernel preferred that tuning measured as fastest, if tuning is asked for and a result is
    stored. Otherwise `selection` itself."""
    if not _is_asked(selection) or (result := tuned.find(selection).result) is None:
        return selection
    return replace(selection, preferred=result.kernel)


def chosen(call: Call, selection: Selection) -> Selection:
    """Like `known`, but if no result is stored and there are several kernels, they are measured now.

    With EPIFUSE_NO_COMPILE=1 nothing is measured, because no request may wait. Raises `ArgumentError` for tensors
    without data.
    """
    found = known(selection)
    if found is not selection or not _is_asked(selection) or CONFIG.no_compile or not _is_choice(selection):
        return found
    require_data(call)
    with _MEASURING:  # another thread may have measured it meanwhile
        found = known(selection)
        return _measured(call, selection) if found is selection else found


def _is_choice(selection: Selection) -> bool:
    """Whether there are several kernels to time. An epilogue that prints is not timed: it would print each time."""
    best = selection.best
    return best is not None and not best.graph.effects and len(selection.plans) > 1


def _measured(call: Call, selection: Selection) -> Selection:
    best = selection.best
    assert best is not None
    if is_capturing(best):
        warnings.warn("kernels are not tuned while a CUDA graph is captured: make this call once before", stacklevel=8)
        return selection
    compile_ahead(selection.plans, None, progress=True)
    times, failed = _timed(call, selection)
    if not times:
        why = next(iter(failed.values()))
        warnings.warn(f"kernels are not tuned, as none ran on the values that timing draws: {why}", stacklevel=8)
        return selection
    return replace(selection, preferred=_kept(best, times).kernel)


def note(selection: Selection) -> tuple[str, ...]:
    """The lines of `explain` about tuning."""
    if not _is_asked(selection):
        return ()
    found = tuned.find(selection)
    return (*found.ignored, _result_text(found))


def _result_text(found: Found) -> str:
    if (result := found.result) is None:
        return "nothing was measured for it yet: the order is estimated"
    return (
        f"{result.kernel} is the fastest of {len(result.microseconds)} that were measured, "
        f"with {result.microseconds[result.kernel]:.4g} us, for {result.problem}"
    )


def _is_asked(selection: Selection) -> bool:
    return selection.problem.constraints.tune and selection.best is not None


# --- measuring --------------------------------------------------------------------------------------------------------


def tune_all(
    asked: Sequence[tuple[Call, Selection]], workers: int | None, *, anew: bool, progress: bool
) -> tuple[list[Fastest], list[tuple[str, str]]]:
    """The fastest kernel for each call, and what failed. All kernels are compiled before the first one is timed.

    With `anew`, stored results are not used.
    """
    before = [None if anew else tuned.find(selection).result for _, selection in asked]
    missing = [selection for (_, selection), result in zip(asked, before, strict=True) if result is None]
    _compile([plan for selection in missing for plan in selection.plans], workers, progress=progress)
    results, failed = [], []
    for (call, selection), result in zip(asked, before, strict=True):
        best = selection.best
        assert best is not None
        if result is None:
            with _MEASURING:
                times, why = _timed(call, selection) if not best.graph.effects else ({}, _PRINTS)
            failed += [(f"{name}, {best.problem.describe()}", text) for name, text in why.items()]
            if not times:
                continue
            result = _kept(best, times, is_all=not (why and CONFIG.no_compile))
            results.append(Fastest(result.problem, result.kernel, result.microseconds))
        else:
            results.append(Fastest(best.problem.describe(), result.kernel, result.microseconds, found=True))
        if progress and is_watched():
            sys.stderr.write(f"tuned {len(results)} of {len(asked)}: {results[-1]}\n")
    return results, failed


_PRINTS = {"every kernel": "it is not timed, as it would print each time"}


def _compile(plans: Iterable[Plan], workers: int | None, *, progress: bool) -> None:
    """Compile the kernels in parallel. Errors are ignored here, since building the plan later raises them again."""
    if not CONFIG.no_compile:
        compile_ahead(plans, workers, progress=progress)


def _kept(best: Plan, seconds: Mapping[str, float], *, is_all: bool = True) -> tuned.Result:
    """The result for these times. It is stored if `is_all`: if no kernel is missing because none may be compiled."""
    result = tuned.result_of(best, {name: round(1e6 * each, 3) for name, each in seconds.items()})
    if is_all:
        tuned.keep(best, result)
    return result


def _timed(call: Call, selection: Selection) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of each kernel by name, and why other kernels could not be timed. Grad mode has to be off."""
    best = selection.best
    assert best is not None
    sets = _sets(call, best)
    variants, failed = {}, {}
    for plan in selection.plans:
        try:
            prepared = Prepared.of(plan)
            steps = [prepared.bind(each, outputs) for each, outputs in sets]
            steps[0]()
            variants[plan.spec.name] = steps
        except EpifuseError as error:
            failed[plan.spec.name] = str(error)
    if not variants:
        return {}, failed
    taken = in_turn([*variants.values()], torch.device(best.problem.a.device))
    return {name: median(each) for name, each in zip(variants, taken, strict=True)}, failed


_MOST_SETS = 64
_EXCEEDED = 4
"""The size of all sets of operands together, in sizes of the L2 cache."""


def _sets(call: Call, plan: Plan) -> list[tuple[Call, Mapping[str, torch.Tensor]]]:
    """Calls with random values, and their outputs: so many sets that no call finds its operands in the L2 cache."""
    call = with_infos(call)
    outputs = outputs_of(plan.graph, plan.problem)
    names = {output.name for output in outputs}
    drawn = partial(random_like, integer=1)  # 1, as an integer may be a divisor, and an index may be out of range

    def one() -> tuple[Call, Mapping[str, torch.Tensor]]:
        a, b = drawn(call.request.a), drawn(call.request.b)
        tensors = {name: drawn(tensor) for name, tensor in call.tensors.items()}
        made = call._replace(request=call.request._replace(a=a, b=b), tensors=tensors)
        given = {name: tensor for name, tensor in tensors.items() if name in names}
        return made, destinations(outputs, given)

    first = one()
    held = (first[0].request.a, first[0].request.b, *{**first[0].tensors, **first[1]}.values())
    size = sum(tensor.numel() * tensor.element_size() for tensor in held)
    count = math.ceil(_EXCEEDED * plan.problem.target.processor.l2 / max(size, 1))
    return [first, *(one() for _ in range(min(count, _MOST_SETS) - 1))]
