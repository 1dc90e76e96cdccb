"""The graph passes between parsing and planning: functions (graph, problem) -> graph, run in the order of `PIPELINE`.

With `CONFIG.verify` the graph is checked after every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from epifuse.base.config import CONFIG
from epifuse.fusion.operations import COMMUTATIVE
from epifuse.ir import Graph
from epifuse.ir.digest import Identity, identify
from epifuse.passes.accumulate import accumulate
from epifuse.passes.assign_stages import assign_stages
from epifuse.passes.canonicalise import canonicalise
from epifuse.passes.eliminate_reductions import eliminate_reductions
from epifuse.passes.fuse_operators import fuse_operators
from epifuse.passes.infer_types import infer_types
from epifuse.passes.lower import lower
from epifuse.passes.prune import prune
from epifuse.passes.verify import verify, verify_written
from epifuse.request.problem import Problem

Pass = Callable[[Graph, Problem], Graph]

PIPELINE: tuple[Pass, ...] = (
    infer_types,
    canonicalise,
    eliminate_reductions,
    fuse_operators,
    prune,
    accumulate,
    assign_stages,
)
_TYPING = 2  # passes


def run(graph: Graph, problem: Problem) -> Graph:
    """The graph after all passes. Raises `EpilogueTypeError` if the epilogue has no meaning for this problem."""
    return finished(typed(graph, problem), problem)


def typed(graph: Graph, problem: Problem) -> Graph:
    """The graph after the first passes: with the types of all values, in canonical form."""
    if CONFIG.verify:
        verify_written(graph)
    return _through(PIPELINE[:_TYPING], graph, problem)


def finished(graph: Graph, problem: Problem) -> Graph:
    """A graph from `typed`, after the remaining passes."""
    return _through(PIPELINE[_TYPING:], graph, problem)


def _through(steps: Sequence[Pass], graph: Graph, problem: Problem) -> Graph:
    for step in steps:
        before, graph = graph, step(graph, problem)
        if CONFIG.verify:
            verify(step.__name__, before, graph)
    return graph


def identity(graph: Graph, problem: Problem) -> Identity:
    """Identity of the computation. Renaming, statement order, swapped arguments of commutative operations, and inlined
    activations do not change it."""
    return identify(canonicalise(lower(graph, frozenset()), problem), COMMUTATIVE)
