"""From a request to tensors: found again and launched, or described, settled, selected, built and launched."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from epifuse import providers
from epifuse.base.errors import Loc, UnsupportedError, fail
from epifuse.plan import select
from epifuse.plan.settle import Settled, settle
from epifuse.request.signature import Call, Request, describe, looked_at
from epifuse.runtime.background import choose
from epifuse.runtime.launch import Prepared, destinations, find, outputs_of, remember, require_data, require_unrecorded
from epifuse.runtime.reference import unfused


def run(request: Request) -> dict[str, torch.Tensor]:
    """The outputs by name. A call like an earlier one is only bound and launched. Called where grad mode is off.

    Raises `UnsupportedError` where no kernel can run it, before anything is written.
    """
    return execute(describe(request))


def execute(call: Call) -> dict[str, torch.Tensor]:
    """The outputs by name, of a request that was described."""
    prepared = find(call)
    return planned(call) if prepared is None else prepared.launch(call)


def planned(call: Call) -> dict[str, torch.Tensor]:
    """The outputs by name, of a call that was not seen before, and that autograd is not to record."""
    if call.recorded:
        require_unrecorded(call)
    call.request.options.check()
    call = looked_at(call)
    return launch(call, settle(call))


def launch(call: Call, settled: Settled) -> dict[str, torch.Tensor]:
    """Plan, build and run; the outputs by name. Raises `UnsupportedError` where no kernel can run it."""
    problem, structure = settled
    selection = select(structure, problem, providers.candidates())
    if selection.best is None:
        return _fall_back(call, settled, selection.reasons, selection.loc)
    require_data(call)
    try:
        plan, until = choose(selection.best, selection)
        prepared = Prepared.of(plan, is_final=until is None)
    except UnsupportedError as error:  # what compiles or loads it is missing, or forbidden
        if call.request.options.fallback is None:
            raise
        return _fall_back(call, settled, [str(error)])
    outputs = prepared.launch(call)
    remember(call, prepared, until)
    return outputs


def _fall_back(call: Call, settled: Settled, reasons: Iterable[str], loc: Loc | None = None) -> dict[str, torch.Tensor]:
    """Unfused, by PyTorch, where that is allowed."""
    options = call.request.options
    listed = "\n".join(f"  {reason}" for reason in reasons)
    if options.fallback is None:
        raise fail("no_kernel", loc, reasons=listed, hint=options.hint)
    warnings.warn(f"no kernel can run this, so PyTorch runs it unfused:\n{listed}", stacklevel=6)
    require_data(call)
    outputs = destinations(outputs_of(settled.structure.graph, settled.problem), call.tensors)
    unfused(call, settled, outputs)
    return outputs
