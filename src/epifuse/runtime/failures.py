"""Turning errors of a launch into errors of epifuse."""

from __future__ import annotations

import torch

from epifuse import providers
from epifuse.base.errors import EpifuseError, fail
from epifuse.ir import Graph
from epifuse.plan import Plan

OURS = (EpifuseError, torch.OutOfMemoryError, MemoryError)  # an error about lacking memory is passed on as it is


def explained(error: Exception, plan: Plan) -> EpifuseError:
    """The error of epifuse to raise for an error of a launch."""
    return divided_by_zero(error, plan.graph) or fail(
        "launch", None, kernel=plan.spec.name, detail=_detail(error, plan), plan=plan
    )


def _detail(error: Exception, plan: Plan) -> str:
    """The text of the error. For a provider of another package it has the error's type, as the text may be empty."""
    is_ours = plan.spec.provider in providers.NAMES
    return str(error) if is_ours else f"the provider '{plan.spec.provider}' raised {type(error).__name__}: {error}"


def divided_by_zero(error: Exception, graph: Graph) -> EpifuseError | None:
    """The error for // or % of integers by zero, which PyTorch raises while the CPU computes; None for other errors.

    It has the place of the division if only one division of the graph can be the cause.
    """
    if "ZeroDivisionError" not in str(error):
        return None
    divisions = [node for node in graph.nodes if node.op in ("floor_divide", "remainder")]
    places = {graph.loc(node) for node in divisions if node.args[1].op != "const"}
    return fail("integer_division", places.pop() if len(places) == 1 else None)
