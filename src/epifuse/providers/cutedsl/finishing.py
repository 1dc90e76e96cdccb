"""What is computed after all tiles, step by step. Imports no cutlass.

A step merges reductions of one extent, and computes what is made of them. A finished value may be reduced again: each
of its elements is a partial result that a later step merges. What later steps read of a merged reduction is left where
its first partial result was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from epifuse.ir import Graph, Node
from epifuse.passes.spelling import reductions_under
from epifuse.providers.cutedsl.partials import Reduction, reductions_of

Place = tuple[int, frozenset[str]]
"""Of a step: its turn, and the axes of its values. Steps of one turn do not need each other."""


class Step(NamedTuple):
    """One step: the axes of its values, the numbers of its outputs, and the nodes that it computes, reductions first.

    By number of the reduction: which are `merged`, which were merged before and are `read`, which of the merged are
    `left` for later steps, and of which the step computes the elements, which are `reduced` again.
    """

    axes: frozenset[str]
    outputs: tuple[int, ...]
    nodes: tuple[Node, ...]
    merged: tuple[int, ...]
    read: tuple[int, ...]
    left: tuple[int, ...]
    reduced: tuple[int, ...]


def steps(graph: Graph, outputs: Iterable[int]) -> tuple[Step, ...]:
    """The steps in order, as few as can be; `outputs` are the numbers of those that are merged."""
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
    return tuple(step._replace(left=tuple(number for number in step.merged if number in wanted)) for step in found)


def _places(
    graph: Graph, reductions: Sequence[Reduction], values: Iterable[Node]
) -> tuple[Mapping[Node, Place], Sequence[Place]]:
    """Where these values are computed, and where the reductions are merged: where a value needs them, if that does."""
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
    """What is computed to get these of merged reductions, those and all else that is given first."""
    found: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(() if node.op == "reduce" else node.args)
    return tuple(node for node in graph.nodes if node in found)
