"""Epilogues that need the product more than once: planned as one launch a sweep, where the caller allows it.

Imports no cutlass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import NamedTuple

from epifuse import passes
from epifuse.ir import Graph, Load, Node
from epifuse.ir.graph import topological
from epifuse.passes.assign_stages import has_row_stage
from epifuse.passes.spelling import reductions_under, spelled
from epifuse.passes.split_sweeps import Part, crossing_names, split_sweeps
from epifuse.plan import Allocation, KernelSpec, Plan, Reason, Refusal
from epifuse.problem import Problem
from epifuse.providers import sequence
from epifuse.providers.cutedsl.lowering import lower
from epifuse.providers.cutedsl.program import Lowered

OneLaunch = Callable[[KernelSpec, Lowered, Problem], Allocation | Refusal]


class _Launch(NamedTuple):
    """One of several launches: its part, and what the part was lowered to."""

    part: Part
    work: Lowered


@lru_cache(maxsize=256)  # every design asks for the same
def _split(graph: Graph, problem: Problem, *, whole_rows: bool) -> tuple[_Launch, ...]:
    parts = split_sweeps(graph, problem, whole_rows=whole_rows)
    return tuple(_Launch(part, lower(*part)) for part in parts)


def supports(spec: KernelSpec, work: Lowered, problem: Problem, one_launch: OneLaunch) -> Allocation | Refusal:
    """What one launch can do, else what several can where they are allowed; else why not and what else there is."""
    answer = one_launch(spec, work, problem)
    if isinstance(answer, Allocation):
        return answer
    if problem.constraints.allow_recompute:
        for launches in _ways_to_split(work.typed, problem):
            if isinstance(several := _several(spec, launches, problem, one_launch), Allocation):
                return several
    return Refusal(spec.name, partial(_reason, answer, spec, work.typed, problem, one_launch))


def _ways_to_split(graph: Graph, problem: Problem) -> Iterator[tuple[_Launch, ...]]:
    # Whole rows first: what a tile can hold needs no launch of its own.
    for whole_rows in (True, False) if has_row_stage(graph) else (True,):
        launches = _split(graph, problem, whole_rows=whole_rows)
        if len(launches) > 1:  # one where no value varies over rows and columns
            yield launches


def _reason(refusal: Refusal, spec: KernelSpec, graph: Graph, problem: Problem, one_launch: OneLaunch) -> Reason:
    """Why one launch cannot, and what several could, or why they cannot either."""
    text = refusal.reason
    for launches in _ways_to_split(graph, problem):
        several = _several(spec, launches, problem, one_launch)
        if isinstance(several, Allocation):
            text = f"{text}; {_ways_out(tuple(launch.part for launch in launches), problem)}"
            break
        if several.reason != refusal.reason:
            text = f"{text}; as {len(launches)} launches: {several.reason}"
    return Reason(text, refusal.loc)


def _several(
    spec: KernelSpec, launches: tuple[_Launch, ...], problem: Problem, one_launch: OneLaunch
) -> Allocation | Refusal:
    plans = []
    for (graph, part), work in launches:
        answer = one_launch(spec, work, part)
        if isinstance(answer, Refusal):
            return answer
        plans.append(Plan(spec, part, *passes.identity(graph, part), answer, graph))
    allocations = [plan.allocation for plan in plans]
    between = sequence.slots([launch.part for launch in launches], problem)
    return Allocation(
        allocations[0].tile,
        cost=sum(allocation.cost for allocation in allocations),
        workspace_bytes=sequence.workspace_bytes(between, [a.workspace_bytes for a in allocations]),
        launches=tuple(plans),
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
