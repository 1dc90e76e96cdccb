"""Errors of a launch as ours."""

from __future__ import annotations

import torch

from epifuse import providers
from epifuse.base.errors import EpifuseError, fail
from epifuse.ir import Graph
from epifuse.plan import Plan

OURS = (EpifuseError, torch.OutOfMemoryError, MemoryError)  # memory that is lacking stays torch's own error


def explained(error: Exception, plan: Plan) -> EpifuseError:
    """An error of a launch as one of ours."""
    return divided_by_zero(error, plan.graph) or fail(
        "launch", None, kernel=plan.spec.name, detail=_detail(error, plan), plan=plan
    )


def _detail(error: Exception, plan: Plan) -> str:
    """The error; of a provider of another package with its type, which may be all that it says."""
    is_ours = plan.spec.provider in providers.NAMES
    return str(error) if is_ours else f"the provider '{plan.spec.provider}' raised {type(error).__name__}: {error}"


def divided_by_zero(error: Exception, graph: Graph) -> EpifuseError | None:
    """Ours for // and % of integers by zero, which PyTorch finds while the CPU computes, or None: an error by any other
    text. With the place of the division, where there is only one it can be."""
    if "ZeroDivisionError" not in str(error):
        return None
    divisions = [node for node in graph.nodes if node.op in ("floor_divide", "remainder")]
    places = {graph.loc(node) for node in divisions if node.args[1].op != "const"}
    return fail("integer_division", places.pop() if len(places) == 1 else None)
