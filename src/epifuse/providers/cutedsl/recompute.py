"""Epilogues that need the product more than once: planned as one launch a sweep, where the caller allows it.

Imports no cutlass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from epifuse import passes
from epifuse.ir import Graph, Load, Node
from epifuse.ir.graph import topological
from epifuse.passes.assign_stages import has_row_stage
from epifuse.passes.spelling import reductions_under, spelled
from epifuse.passes.split_sweeps import Part, crossing_names, split_sweeps
from epifuse.plan import Allocation, KernelSpec, Plan, Refusal
from epifuse.problem import Problem
from epifuse.providers import sequence

Supports = Callable[[KernelSpec, Graph, Problem], Allocation | Refusal]

_split = lru_cache(maxsize=256)(split_sweeps)
"""Every design asks for the same."""


def supports(spec: KernelSpec, graph: Graph, problem: Problem, one_launch: Supports) -> Allocation | Refusal:
    """What one launch can do, else what several can where they are allowed; else why not and what else there is."""
    answer = one_launch(spec, graph, problem)
    if isinstance(answer, Allocation):
        return answer
    # Whole rows first: what a tile can hold needs no launch of its own.
    for whole_rows in (True, False) if has_row_stage(graph) else (True,):
        parts = _split(graph, problem, whole_rows=whole_rows)
        if len(parts) < 2:  # none where no value varies over rows and columns
            continue
        several = _several(spec, parts, problem, one_launch)
        if isinstance(several, Allocation):
            allowed = problem.constraints.allow_recompute
            return several if allowed else replace(answer, reason=f"{answer.reason}; {_ways_out(parts, problem)}")
        if several.reason != answer.reason:
            answer = replace(answer, reason=f"{answer.reason}; as {len(parts)} launches: {several.reason}")
    return answer


def _several(spec: KernelSpec, parts: tuple[Part, ...], problem: Problem, one_launch: Supports) -> Allocation | Refusal:
    launches = []
    for graph, part in parts:
        answer = one_launch(spec, graph, part)
        if isinstance(answer, Refusal):
            return answer
        launches.append(Plan(spec, part, *passes.identity(graph, part), answer, graph))
    allocations = [launch.allocation for launch in launches]
    between = sequence.slots(parts, problem)
    return Allocation(
        allocations[0].tile,
        cost=sum(allocation.cost for allocation in allocations),
        workspace_bytes=sequence.workspace_bytes(between, [a.workspace_bytes for a in allocations]),
        launches=tuple(launches),
    )


def parts_of(plan: Plan) -> tuple[Part, ...]:
    """The parts that a plan of several launches consists of."""
    return tuple(Part(launch.graph, launch.problem) for launch in plan.allocation.launches)


# --- the refusal of what would take several ----------------------------------------------------------------------


def _ways_out(parts: tuple[Part, ...], problem: Problem) -> str:
    """What to write instead, and what computing the product again would cost."""
    count = len(parts)
    further = "a second launch recomputes" if count == 2 else f"{count - 1} further launches recompute"
    return (
        f"{_what_to_store(parts, problem)} in the next GEMM's epilogue, or pass allow_recompute=True: {further} the "
        f"product, {count}.0 x the FLOPs"
    )


def _what_to_store(parts: tuple[Part, ...], problem: Problem) -> str:
    if dependent := _reductions_of_crossing(parts):
        squares = any(node.attr[0] == "mean" and _is_square(node.args[0]) for node in dependent)
        example = " (mean(x * x) - mean(x) ** 2 for a variance, less exact where the mean is large)" if squares else ""
        unless = f"its reductions need one another: where they can be written so that none does{example}, "
        return f"{unless}store and apply them"
    stored = _reductions_between(parts, problem)
    many = {count: "both " if count == 2 else f"all {count} " for count in stored.values() if count > 1}
    each = [many.get(count, "") + text for text, count in stored.items()]
    return f"store {' and '.join(each)} and apply {'it' if stored.total() == 1 else 'them'}"


def _reductions_of_crossing(parts: tuple[Part, ...]) -> list[Node]:
    """Reductions for which an earlier launch must have finished another: one launch cannot store both."""
    known: set[str] = set()
    found = []
    for part in parts:
        for node in part.graph.nodes:
            below = topological([node]) if node.op == "reduce" else ()
            if any(isinstance(each.attr, Load) and each.attr.name in known for each in below):
                found.append(node)
        known |= {output.name for output in part.graph.outputs}
    return found


def _is_square(node: Node) -> bool:
    return node.op == "mul" and node.args[0] is node.args[1]


def _reductions_between(parts: tuple[Part, ...], problem: Problem) -> Counter[str]:
    """What the parts hand over, as the user would write it; x is not the same in all of them."""
    found: dict[Node, tuple[str, str]] = {}
    for part in parts:
        names = crossing_names(part, problem)
        for output in part.graph.outputs:
            if output.name in names:
                found |= {node: spelled(node, problem) for node in reductions_under(output.node)}
    # Their logsumexp serves exponentials alone: exp(x - amax(x)) / sum(exp(x - amax(x))) is exp(x - logsumexp(x)).
    exponentials = {dims for name, dims in found.values() if name == "logsumexp"}
    return Counter(f"{name}(x{dims})" for name, dims in found.values() if name != "amax" or dims not in exponentials)
