"""A call that differs from an earlier one in its number of rows alone: a kernel is chosen, and nothing else is planned.

Serving and evaluation come with ever new numbers of rows. A signature in which these rows stand for themselves is the
key of what they do not decide; what they do decide, `Answers.of_rows` tells.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from epifuse.passes.structure import reads_rows
from epifuse.plan import Answers, Selection
from epifuse.plan.settle import Settled
from epifuse.request.signature import Call
from epifuse.runtime.launch import Prepared, find_all, is_full, outputs_of, remember_beside


class _Known(NamedTuple):
    """What was found for one number of rows, and the calls that are prepared so far, by the place of their kernel."""

    answers: Answers
    prepared: dict[int, Prepared]


def like(call: Call) -> Prepared | None:
    """What launches the call, if one was prepared that differs in its rows alone and takes the same kernel."""
    if (key := _key(call)) is None:
        return None
    rows = call.request.a.shape[0]
    for known in find_all(key):
        if (costs := known.answers.of_rows(rows)) is not None:
            prepared = known.prepared.get(costs.index(min(costs)))
            return None if prepared is None else _with_rows(prepared, rows)
    return None


def _with_rows(known: Prepared, rows: int) -> Prepared | None:
    """The same for so many rows; None where its kernel is not ready for any number of them."""
    make = getattr(known.runner, "with_rows", None)
    runner = None if make is None else make(rows)
    if runner is None:
        return None
    plan = known.plan.with_rows(rows)
    outputs = outputs_of(plan.graph, plan.problem)
    return Prepared(plan, runner, known.kinds, outputs, known.accumulates, known.is_final)


def remember(call: Call, settled: Settled, selection: Selection, prepared: Prepared) -> None:
    """Keep what was planned for a call, for others that differ in their rows alone."""
    able = [answers for answers in selection.answers if answers.specs]
    rows = settled.problem.extents["m"]
    if len(able) != 1 or able[0].of_rows(rows) is None or not _is_open(call, settled, prepared):
        return
    key, place = _key(call), able[0].specs.index(prepared.plan.spec)
    try:
        for known in find_all(key):
            if known.answers.of_rows(rows) is not None:
                known.prepared[place] = prepared
                return
        if not is_full(key):
            remember_beside(key, _Known(able[0], {place: prepared}))
    except TypeError:  # an option that is no key, as a list of names
        return


def _key(call: Call) -> Hashable:
    """The signature without the rows of A; None where A has batches, or autograd is to record the call."""
    shape = call.request.a.shape
    if len(shape) != 2 or call.recorded:
        return None
    rows = shape[0]
    return ("any rows", *[None if fact == rows else fact for fact in call.signature])


def _is_open(call: Call, settled: Settled, prepared: Prepared) -> bool:
    """Whether the number of rows is in the signature as extents of A and of operands alone, and decides no check."""
    problem, _ = settled
    rows, (a, b, *others) = problem.extents["m"], call.infos
    fixed = (a.shape[-1], *a.strides, *b.shape, *b.strides, *(step for info in others for step in info.strides))
    parsed = call.request.parsed
    return (
        prepared.is_final
        and not problem.constraints.tune
        and not problem.batched
        and rows not in fixed
        and call.tensors.keys().isdisjoint(parsed.output_names)
        and not reads_rows(parsed.graph, problem)
    )
