"""Reductions of operands alone, as the number of rows that count: after all tiles, beside what was reduced of the rows.

A tile reduces what it computes, and what varies over rows alone is in many tiles. Where the epilogue reduces its rows
as well, the operand is read with their results, one value a row, and reduced with them. Imports no cutlass.
"""

from __future__ import annotations

from epifuse.ir import Builder, Factor, Graph, Node
from epifuse.ir.graph import keep, rebuilt, topological
from epifuse.ir.types import canonical
from epifuse.passes.canonicalise import typed
from epifuse.request.problem import Problem


def beside_rows(graph: Graph, problem: Problem) -> Graph:
    """The graph in which reductions of operands alone wait for a reduction of the product with a value for each."""
    of_product = _above(graph, {node for node in graph.nodes if node.op == "accum"})
    alone = [node for node in graph.nodes if node.op == "reduce" and node.args[0] not in of_product]
    later = _above(graph, {*alone})
    able = [node for node in graph.nodes if node.op == "reduce" and node in of_product and node not in later]
    beside = {node: found for node in alone if (found := _beside(node, able, graph, problem)) is not None}
    if not beside:
        return graph
    builder, made = Builder(), dict[Node, Node]()
    for old in topological([*beside.values(), *graph.roots, *graph.hosts.values()]):
        args = tuple(made[arg] for arg in old.args)
        if old in beside:
            further = {*graph.types[beside[old]].factors} - {*graph.types[old.args[0]].factors}  # of one element
            attr = old.attr[0], canonical((*old.attr[1], *further))
            made[old] = builder.node("reduce", _waiting(args[0], made[beside[old]], builder), attr=attr)
        else:
            made[old] = keep(old, args, builder)
        builder.locs[made[old]] = graph.locs.get(old, ())
        if old in graph.types:
            builder.types.setdefault(made[old], graph.types[old])
    return rebuilt(graph, made, builder)


def _above(graph: Graph, below: set[Node]) -> set[Node]:
    """These nodes, and what needs one of them."""
    found = {*below}
    for node in graph.nodes:
        if not found.isdisjoint(node.args):
            found.add(node)
    return found


def _beside(node: Node, able: list[Node], graph: Graph, problem: Problem) -> Node | None:
    """The first of these reductions that has a value for each that `node` reduces."""

    def several(node: Node) -> list[Factor]:
        return [factor for factor in graph.types[node].factors if factor.size(problem.extents) != 1]

    reduced = node.args[0]
    is_one = not graph.types[reduced].factors
    return None if is_one else next((other for other in able if several(other) == several(reduced)), None)


def _waiting(value: Node, other: Node, builder: Builder) -> Node:
    """The same value, which is not there before the other: whatever that is, one of these holds."""
    either = typed(builder, "logical_or", (typed(builder, "eq", (other, other)), typed(builder, "ne", (other, other))))
    if builder.types[value].kind == "mask":
        return typed(builder, "logical_and", (value, either))
    return typed(builder, "where", (either, value, value))
