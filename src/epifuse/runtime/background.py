"""Compiling in the background, so that a call need not wait for the compiler.

If the best plan's kernel is not compiled yet, a call runs on a *stand-in*: another kernel whose results are equal to
the last bit. A worker compiles the best kernel meanwhile. Prepared calls on a stand-in are forgotten when that is done,
so the next such call is planned anew. Calls that run on the best plan lose no time.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

import torch

from epifuse import providers
from epifuse.base.cache import LRU
from epifuse.base.config import CONFIG
from epifuse.base.errors import UnsupportedError
from epifuse.plan import Plan, Selection
from epifuse.runtime.workers import WORKERS, failure


class Outcome(Future[str | None]):
    """The result of a kernel that a worker compiles: None if it is compiled, or the reason why it failed.

    If `is_awaited`, the kernel was submitted before any call came, and calls wait for it. Otherwise calls run on
    another kernel meanwhile, and `stand_in` names the one of the last call.
    """

    is_awaited = False
    stand_in: str | None = None


_SUBMITTED: LRU[tuple[str, str, int], Outcome] = LRU(512)
"""By provider, text and process id, since a forked child has workers of its own. Finished outcomes are kept, so that a
kernel that failed is not submitted again."""


class Choice(NamedTuple):
    """The plan that a call runs on. If it is a stand-in, `better_ready` is done once a better kernel may be there.
    `further_texts` are those of further kernels, which `complete` compiles after the call's own."""

    plan: Plan
    better_ready: Outcome | None = None
    further_texts: tuple[str, ...] = ()


def choose(best: Plan, selection: Selection) -> Choice:
    """Choose the plan for a new call: the best one, or a stand-in while the kernels of the best one are compiled.

    Raises `UnsupportedError` if the package that finds compiled kernels is not installed.
    """
    if not _is_submitted(best):
        return Choice(best)
    missing = [text for text in _kernels(best) if not _is_loaded(best, text)]
    if not missing:
        return Choice(best)
    submitted = [_SUBMITTED.get(_key(best, text)) for text in missing]
    if (plan := _last_stand_in(best, selection, submitted)) is not None:
        return Choice(plan, submitted[-1])
    for outcome in submitted:
        if outcome is not None and outcome.is_awaited:
            outcome.result()
    if best.allocation.bits is None:
        return Choice(best)
    is_ready = _is_loaded if is_capturing(best) else _is_loaded_or_stored
    # A kernel that a worker is compiling is not looked for on disk: that costs as much as all of planning.
    missing = [text for text in missing if _is_pending(best, text) or not is_ready(best, text)]
    if not missing:
        return Choice(best)
    stand_in = _stand_in(selection, is_ready)
    if stand_in is None:
        return Choice(best, further_texts=_further_texts(best))
    outcomes = [_outcome(best, text) for text in missing]
    outcomes[-1].stand_in = stand_in.spec.name
    over = [outcome for outcome in outcomes if outcome.done()]
    if over and is_ready is _is_loaded_or_stored:
        # Nothing is submitted twice, so this call compiles. It does so without a warning if the worker succeeded: then
        # the kernel was stored after the look-up, or in a folder of the worker's own, about which the store warns.
        _warn_of(best, over)
        return Choice(best)
    return Choice(stand_in, outcomes[-1])


def prepare() -> None:
    """Have a worker import the compiler for GPU kernels, if there is a GPU, while the caller does not know yet which
    kernels it needs."""
    if CONFIG.background and not CONFIG.no_compile and torch.cuda.is_available():
        WORKERS.submit("cutedsl", None)


def submit(plan: Plan) -> None:
    """Have workers compile the kernels of a plan that later calls will run on, unless they are loaded or stored.

    They are compiled in parallel until the first call, which waits for them.
    """
    if not _is_submitted(plan):
        return
    with suppress(UnsupportedError):  # the package that finds compiled kernels is missing: the call will raise
        for text in _kernels(plan):
            if not _is_loaded_or_stored(plan, text):
                _outcome(plan, text, is_awaited=True)


def note(best: Plan | None, selection: Selection) -> str | None:
    """The line of `explain` while the best plan's kernels are being compiled, or None."""
    if best is None or best.allocation.bits is None:
        return None
    submitted = [_SUBMITTED.get(_key(best, text)) for text in _kernels(best)]
    pending = [outcome for outcome in submitted if outcome is not None and not outcome.done()]
    if not pending:
        return None
    stand_in = _last_stand_in(best, selection, pending) or _stand_in(selection, _is_loaded_or_stored)
    if stand_in is None:
        return None
    return f"runs on {stand_in.spec.name} until {best.spec.name} is compiled in the background"


def _is_submitted(plan: Plan) -> bool:
    """Whether workers may compile the plan's kernels. For a loop of the CPU starting a worker would take longer."""
    may_be = plan.allocation.bits is not None or plan.problem.target.device == "cuda"
    return may_be and CONFIG.background and not CONFIG.no_compile


def _kernels(plan: Plan) -> tuple[str, ...]:
    return providers.load(plan.spec.provider).kernels(plan)


def _is_loaded(plan: Plan, text: str) -> bool:
    return providers.load(plan.spec.provider).is_loaded(text)


def _is_loaded_or_stored(plan: Plan, text: str) -> bool:
    provider = providers.load(plan.spec.provider)
    return provider.is_loaded(text) or provider.is_stored(text)


def _first(plans: Iterable[Plan], is_ready: Callable[[Plan, str], bool]) -> Plan | None:
    return next((plan for plan in plans if all(is_ready(plan, text) for text in _kernels(plan))), None)


def _last_stand_in(best: Plan, selection: Selection, submitted: Sequence[Outcome | None]) -> Plan | None:
    """The stand-in of the last call that needed these kernels, while all of them are still being compiled; else None.

    It saves the search: on an H200 a loaded kernel may be the 19th by rank, which takes 130 us to reach.
    """
    if any(outcome is None or outcome.is_awaited or outcome.done() for outcome in submitted):
        return None
    last = submitted[-1]
    plan = None if last is None or last.stand_in is None else selection.named(last.stand_in)
    if plan is None or plan.allocation.bits != best.allocation.bits:
        return None
    return _first((plan,), _is_loaded)


def _stand_in(selection: Selection, is_ready: Callable[[Plan, str], bool]) -> Plan | None:
    """The plan to run until the worker is done: with kernels that are loaded, or else that `is_ready` accepts."""
    return _first(selection.stand_ins(), _is_loaded) or _first(selection.stand_ins(), is_ready)


def is_capturing(plan: Plan) -> bool:
    """Whether a launch would be captured in a CUDA graph. Loading a kernel may then break the capture."""
    if plan.problem.target.device != "cuda":
        return False
    with torch.cuda.device(plan.problem.a.device):
        return torch.cuda.is_current_stream_capturing()


def _further_texts(plan: Plan) -> tuple[str, ...]:
    """The texts of kernels to compile for later calls with another M. No kernel with other bits can stand in for them,
    so these calls would have to wait for the compiler."""
    return tuple(text for text in plan.allocation.with_other_rows() if not _is_loaded_or_stored(plan, text))


def complete(plan: Plan, further_texts: Iterable[str]) -> None:
    """Compile the kernels `further_texts` in this process, which has just imported the compiler for the call's own
    kernel. A worker would have to start and import it first."""
    for text in further_texts:
        with suppress(Exception):  # this call does not need the kernel; a call that does will raise
            providers.load(plan.spec.provider).compile(text)


# --- kernels that workers compile -------------------------------------------------------------------------------------


def _key(plan: Plan, text: str) -> tuple[str, str, int]:
    return plan.spec.provider, text, os.getpid()


def _is_pending(plan: Plan, text: str) -> bool:
    outcome = _SUBMITTED.get(_key(plan, text))
    return outcome is not None and not outcome.done()


def _outcome(plan: Plan, text: str, *, is_awaited: bool = False) -> Outcome:
    """The outcome of a kernel. The first thread that asks for it submits the kernel to the workers."""
    key = _key(plan, text)
    if (found := _SUBMITTED.get(key)) is not None:
        return found
    mine = Outcome()
    mine.is_awaited = is_awaited
    found = _SUBMITTED.put(key, mine)
    if found is mine:
        try:
            WORKERS.submit(plan.spec.provider, text).add_done_callback(lambda done: mine.set_result(failure(done)))
        except RuntimeError as error:  # no thread can be started
            mine.set_result(str(error))
    return found


def _warn_of(plan: Plan, outcomes: Iterable[Outcome]) -> None:
    for outcome in outcomes:
        if (why := outcome.result()) is not None:
            text = f"{plan.spec.name} was not compiled in the background, so this call compiles it: {why}"
            warnings.warn(text, stacklevel=8)  # the caller of `gemm`
