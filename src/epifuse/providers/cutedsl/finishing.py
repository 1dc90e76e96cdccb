"""The steps that run after all tiles: they merge reductions, and compute values from them. Imports no cutlass.

A step merges reductions of one extent, and computes the values that are made of them. A finished value may be reduced
again: each of its elements is then a partial result that a later step merges. If later steps read a merged reduction,
its result replaces its first partial result in the workspace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from epifuse.ir import Graph, Node
from epifuse.passes.spelling import reductions_under
from epifuse.providers.cutedsl.partials import Reduction, reductions_of

Place = tuple[int, frozenset[str]]
"""A step's turn, and the axes of its values. Steps of one turn do not depend on each other."""


class Step(NamedTuple):
    """One step: the axes of its values, the numbers of its outputs, and the nodes that it computes, reductions first.

    The other fields are numbers of reductions. The step merges those in `merged`, reads those in `read`, which an
    earlier step merged, and keeps the results of those in `kept_for_later`. `reduced` are reductions of finished
    values whose elements the step computes.
    """

    axes: frozenset[str]
    outputs: tuple[int, ...]
    nodes: tuple[Node, ...]
    merged: tuple[int, ...]
    read: tuple[int, ...]
    kept_for_later: tuple[int, ...]
    reduced: tuple[int, ...]


def steps(graph: Graph, outputs: Iterable[int]) -> tuple[Step, ...]:
    """Return the steps in order, as few as possible. `outputs` are the numbers of outputs computed after all tiles."""
    reductions = reductions_of(graph)
    made = {i: graph.outputs[i].node for i in outputs}
    again = {number: each.source for number, each in enumerate(reductions) if each.of is not None}
    computed, merged = _places(graph, reductions, dict.fromkeys([*made.values(), *again.values()]))
    found: list[Step] = []
    for place in sorted(dict.fromkeys([*merged, *computed.values()]), key=lambda place: place[0]):
        own = tuple(i for i, node in made.items() if computed[node] == place)
        reduced = tuple(number for number, node in again.items() if computed[node] == place)
        nodes = _under(graph, [*(made[i] for i in own), *(again[number] for number in reduced)])
        here = tuple(number for number, at in enumerate(merged) if at == place)
        read = tuple(i for i, each in enumerate(reductions) if each.node in nodes and i not in here)
        found.append(Step(place[1], own, nodes, here, read, (), reduced))
    wanted = {number for step in found for number in step.read}
    kept = (tuple(number for number in step.merged if number in wanted) for step in found)
    return tuple(step._replace(kept_for_later=numbers) for step, numbers in zip(found, kept, strict=True))


def _places(
    graph: Graph, reductions: Sequence[Reduction], values: Iterable[Node]
) -> tuple[Mapping[Node, Place], Sequence[Place]]:
    """Return the place where each of these `values` is computed, and the place where each reduction is merged: that of
    the first value that needs it, or one turn earlier if their axes differ."""
    axes = {node: graph.types[node].axes for node in graph.nodes}
    first: dict[Node, int] = {}

    def turn(value: Node) -> int:
        return max(first[below] + (axes[below] != axes[value]) for below in reductions_under(value))

    for each in reductions:
        first[each.node] = 0 if each.of is None else turn(each.source) + 1
    computed = {value: (turn(value), axes[value]) for value in values}
    last: dict[Node, int] = {}
    for value, (at, _) in computed.items():
        for below in reductions_under(value):
            last[below] = min(at - (axes[below] != axes[value]), last.get(below, at))
    return computed, [(last[each.node], axes[each.node]) for each in reductions]


def _under(graph: Graph, roots: Iterable[Node]) -> tuple[Node, ...]:
    """Return the nodes that compute `roots` from merged reductions, these reductions included, arguments first."""
    found: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(() if node.op == "reduce" else node.args)
    return tuple(node for node in graph.nodes if node in found)
