"""Running a request: find an equal earlier call and launch it, or settle, select, build and launch the new call."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import float32

from epifuse import providers
from epifuse.base.errors import Loc, UnsupportedError, fail
from epifuse.frontend import Parsed
from epifuse.plan import select
from epifuse.plan.settle import Settled, settle
from epifuse.request.alike import Guard, are_alike, guard_of
from epifuse.request.options import Options
from epifuse.request.problem import tf32_allowed
from epifuse.request.signature import Call, Request, describe, with_infos
from epifuse.runtime import rows
from epifuse.runtime.background import choose, complete
from epifuse.runtime.failures import divided_by_zero
from epifuse.runtime.launch import (
    Prepared,
    Repeat,
    destinations,
    final,
    find,
    outputs_of,
    remember,
    require_data,
    require_unrecorded,
)
from epifuse.runtime.reference import unfused
from epifuse.runtime.tuning import chosen


def run(request: Request) -> dict[str, torch.Tensor]:
    """Run a request. Returns the outputs by name. If an equal call ran before, this one is only bound and launched.

    Grad mode has to be off. Raises `UnsupportedError` if no kernel can run it, before anything is written.
    """
    return execute(describe(request))


def execute(call: Call) -> dict[str, torch.Tensor]:
    """Run a call. Returns the outputs by name."""
    prepared = find(call)
    return planned(call) if prepared is None else prepared.launch(call)


class CallSite:
    """One place in a program where the same epilogue runs again and again, with operands of these `names`.

    The last launch serves the next tensors if they look alike. If `b_is_transposed`, they hold the transpose of B.
    """

    def __init__(self, parsed: Parsed, options: Options, names: tuple[str, ...] = (), *, b_is_transposed: bool) -> None:
        self.parsed, self.options, self.names, self.b_is_transposed = parsed, options, names, b_is_transposed
        self.known: tuple[Guard, bool, Repeat] | None = None

    def run_if_alike(self, tensors: Sequence[torch.Tensor], numbers: Mapping[str, Any]) -> list[torch.Tensor] | None:
        """The outputs in order, if A, B and the operands in `tensors` look as in the last run; else None."""
        if (known := self.known) is None or not are_alike(known[0], tensors):
            return None
        if known[1] is not (tensors[0].dtype is float32 and tf32_allowed()):
            return None
        return known[2](tensors, numbers)

    def run(self, tensors: Sequence[torch.Tensor], numbers: Mapping[str, Any]) -> list[torch.Tensor]:
        """The outputs in order. The numbers must have the same types each time. Raises what `run` raises."""
        if (made := self.run_if_alike(tensors, numbers)) is not None:
            return made
        a, b, *operands = tensors
        given = {**dict(zip(self.names, operands, strict=True)), **numbers}
        call = describe(Request(a, b.t() if self.b_is_transposed else b, self.parsed, given, self.options))
        outputs = execute(call)
        if not call.infos and len(call.tensors) == len(operands) and (prepared := final(call)) is not None:
            guard = guard_of(tensors)
            tf32 = a.dtype is float32 and tf32_allowed()
            if guard is None:
                self.known = None
            else:
                self.known = guard, tf32, prepared.repeated(self.names, b_is_transposed=self.b_is_transposed)
        return [*outputs.values()]


def planned(call: Call) -> dict[str, torch.Tensor]:
    """Run a call with a new signature, which autograd must not need to record. Returns the outputs by name."""
    if call.recorded:
        require_unrecorded(call)
    if (found := rows.like(call)) is not None:  # its key holds all that the checks below depend on
        outputs = found.prepared.launch(call)
        remember(call, *found)
        return outputs
    call.request.options.check()
    call = with_infos(call)
    return launch(call, settle(call))


def launch(call: Call, settled: Settled) -> dict[str, torch.Tensor]:
    """Plan, build and run a settled call. Returns the outputs by name.

    Raises `UnsupportedError` if no kernel can run it and no fallback is allowed.
    """
    problem, structure = settled
    selection = chosen(call, select(structure, problem, providers.candidates()))
    if selection.best is None:
        return _fall_back(call, settled, selection.reasons, selection.loc)
    require_data(call)
    try:
        plan, better_ready, further_texts = choose(selection.best, selection)
        prepared = Prepared.of(plan, is_final=better_ready is None)
        complete(plan, further_texts)
    except UnsupportedError as error:  # the package that compiles or loads it is missing, or compiling is forbidden
        if call.request.options.fallback is None:
            raise
        return _fall_back(call, settled, [str(error)])
    outputs = prepared.launch(call)
    remember(call, prepared, better_ready)
    rows.remember(call, settled, selection, selection.best, rows.Found(prepared, better_ready))
    return outputs


def _fall_back(call: Call, settled: Settled, reasons: Iterable[str], loc: Loc | None = None) -> dict[str, torch.Tensor]:
    """Run the call unfused, by PyTorch, with a warning. Raises `UnsupportedError` if that is not allowed."""
    options = call.request.options
    listed = "\n".join(f"  {reason}" for reason in reasons)
    if options.fallback is None:
        hint = "" if settled.problem.constraints.batch_invariant else options.hint  # PyTorch's is not
        raise fail("no_kernel", loc, reasons=listed, hint=hint)
    text = f"no kernel can run this, so PyTorch runs it unfused:\n{listed}"
    warnings.warn(text, stacklevel=7)  # the caller of `gemm`
    require_data(call)
    outputs = destinations(outputs_of(settled.structure.graph, settled.problem), call.tensors)
    try:
        unfused(call, settled, outputs)
    except RuntimeError as error:
        raise divided_by_zero(error, settled.structure.graph) or error from None
    return outputs
