"""From the typed graph to the one the kernel walks. Imports no cutlass."""

from __future__ import annotations

from epifuse.ir import Graph
from epifuse.passes.assign_stages import assign_stages
from epifuse.passes.canonicalise import canonicalise
from epifuse.passes.lower import lower as inline
from epifuse.passes.split_operators import split_operators
from epifuse.problem import Problem
from epifuse.providers.cutedsl import costs
from epifuse.providers.cutedsl.log_sums import split_log_sums
from epifuse.providers.cutedsl.program import Lowered

NATIVE = frozenset(costs.FAST)
"""Activations with a fast device form."""


def lower(graph: Graph, problem: Problem) -> Lowered:
    """The graph with what the device has no form of opened, and its stages; the same for all extents of a class."""
    opened = canonicalise(inline(split_operators(graph, problem), NATIVE), problem)
    return Lowered(graph, assign_stages(split_log_sums(opened), problem))
