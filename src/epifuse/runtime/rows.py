"""Calls that differ from an earlier call only in the number of rows, M: only a kernel is chosen, nothing is planned.

Serving and evaluation bring ever new numbers of rows. All that does not depend on this number is found by a key: the
signature with a placeholder for the number of rows. `Answers.of_rows` gives what does depend on it.
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future
from typing import Any, NamedTuple

from epifuse.plan import Answers, Plan, Selection
from epifuse.plan.settle import Settled
from epifuse.request.scaled import SCALES
from epifuse.request.signature import Call
from epifuse.runtime.launch import Prepared, find_all, is_full, outputs_of, remember_beside


class Found(NamedTuple):
    """A prepared call. If it runs on a stand-in, `better_ready` is done once there may be a better kernel."""

    prepared: Prepared
    better_ready: Future[Any] | None


class _Known(NamedTuple):
    """The answers for one number of rows, and the calls prepared so far, by the index of the best kernel."""

    answers: Answers
    found: dict[int, Found]


def like(call: Call) -> Found | None:
    """A prepared call for `call`, from a call that differs in its rows only and has the same best kernel; else None."""
    if (key := _key(call)) is None:
        return None
    rows = call.request.a.shape[0]
    for known in find_all(key):
        if (costs := known.answers.of_rows(rows)) is not None:
            found = known.found.get(costs.index(min(costs)))
            return None if found is None else _with_rows(found, rows)
    return None


def _with_rows(found: Found, rows: int) -> Found | None:
    """The same for another number of rows; None if its kernel cannot serve that, or if a better kernel may be there."""
    (known, better_ready), make = found, getattr(found.prepared.runner, "with_rows", None)
    runner = None if make is None or (better_ready is not None and better_ready.done()) else make(rows)
    if runner is None:
        return None
    plan = known.plan.with_rows(rows)
    outputs = outputs_of(plan.graph, plan.problem)
    return Found(Prepared(plan, runner, known.kinds, outputs, known.accumulates, known.is_final), better_ready)


def remember(call: Call, settled: Settled, selection: Selection, best: Plan, found: Found) -> None:
    """Keep `found`, the prepared call of `call`, for calls that differ in their rows only. `best` is its best plan."""
    able = [answers for answers in selection.answers if answers.specs]
    rows = settled.problem.extents["m"]
    if len(able) != 1 or able[0].of_rows(rows) is None or not _is_open(call, settled):
        return
    key, place = _key(call), able[0].specs.index(best.spec)
    try:
        for known in find_all(key):
            if known.answers.of_rows(rows) is not None:
                known.found[place] = found
                return
        if not is_full(key):
            remember_beside(key, _Known(able[0], {place: found}))
    except TypeError:  # an option is not hashable, for example a list of names
        return


def _key(call: Call) -> Hashable:
    """The signature without the number of rows of A; None if A has batches, or if autograd records the call."""
    shape = call.request.a.shape
    if len(shape) != 2 or call.recorded:
        return None
    rows = shape[0]
    return ("any rows", *[None if fact == rows else fact for fact in call.signature])


def _is_open(call: Call, settled: Settled) -> bool:
    """Whether the number of rows is in the signature only as an extent of A and of operands, and decides no check."""
    problem, parsed = settled.problem, call.request.parsed
    rows, (a, b, *others) = problem.extents["m"], call.infos
    fixed = [a.shape[-1], *a.strides, *b.shape, *b.strides, *(step for info in others for step in info.strides)]
    lying = dict(zip(call.tensors, others, strict=True))
    for name, first in zip(SCALES, (1, 0), strict=True):  # the scales of A have rows
        fixed += lying[name].shape[first:] if name in lying else ()
    return (
        not problem.constraints.tune
        and not problem.batched
        and rows not in fixed
        and call.tensors.keys().isdisjoint(parsed.output_names)
        and "linear_index" not in parsed.graph.ops  # whether an int32 holds these indices depends on the rows
        and "m" not in settled.structure.exact
    )
