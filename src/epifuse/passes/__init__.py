"""The middle of the arrow: a tuple of functions, each (graph, problem) -> graph, checked after every one."""

from __future__ import annotations

from collections.abc import Callable

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


def run(graph: Graph, problem: Problem) -> Graph:
    """Everything between parsing and planning. Raises `EpilogueTypeError` for what the epilogue cannot mean."""
    if CONFIG.verify:
        verify_written(graph)
    for step in PIPELINE:
        before, graph = graph, step(graph, problem)
        if CONFIG.verify:
            verify(step.__name__, before, graph)
    return graph


def counts_equal_values(graph: Graph, problem: Problem) -> bool:
    """Whether a reduction of values that are the same along an axis takes their number: the sum of `ones_like(x)`."""
    if not {"full_like", "reduce_dims"} <= graph.ops:
        return False
    typed = canonicalise(infer_types(graph, problem), problem)
    return any(node.op == "reduce" and node.args[0].op == "expand" for node in typed.nodes)


def identity(graph: Graph, problem: Problem) -> Identity:
    """Identity of the computation, stable under renaming, statement order, commuted arguments, inlined activations."""
    return identify(canonicalise(lower(graph, frozenset()), problem), COMMUTATIVE)
