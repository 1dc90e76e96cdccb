"""Reductions of operands alone, such as the number of rows that a mask selects: they are computed after all tiles.

A tile cannot reduce an operand with one value a row, because many tiles hold the same row. If the epilogue also reduces
the product along each row, the operand is read together with these results, and reduced with them. Imports no cutlass.
"""

from __future__ import annotations

from epifuse.ir import Builder, Factor, Graph, Node
from epifuse.ir.graph import keep, rebuilt, topological
from epifuse.ir.types import canonical
from epifuse.passes.canonicalise import typed
from epifuse.request.problem import Problem


def delay_operand_sums(graph: Graph, problem: Problem) -> Graph:
    """The graph in which a reduction of operands alone waits for one of the product, if that has as many results as the
    former has arguments."""
    of_product = _above(graph, {node for node in graph.nodes if node.op == "accum"})
    alone = [node for node in graph.nodes if node.op == "reduce" and node.args[0] not in of_product]
    later = _above(graph, {*alone})
    able = [node for node in graph.nodes if node.op == "reduce" and node in of_product and node not in later]
    found = {node: _reduction_to_wait_for(node, able, graph, problem) for node in alone}
    delayed = {node: other for node, other in found.items() if other is not None}
    if not delayed:
        return graph
    builder, made = Builder(), dict[Node, Node]()
    for old in topological([*delayed.values(), *graph.roots, *graph.hosts.values()]):
        args = tuple(made[arg] for arg in old.args)
        if old in delayed:
            further = {*graph.types[delayed[old]].factors} - {*graph.types[old.args[0]].factors}  # of size 1
            attr = old.attr[0], canonical((*old.attr[1], *further))
            made[old] = builder.node("reduce", _waiting(args[0], made[delayed[old]], builder), attr=attr)
        else:
            made[old] = keep(old, args, builder)
        builder.locs[made[old]] = graph.locs.get(old, ())
        if old in graph.types:
            builder.types.setdefault(made[old], graph.types[old])
    return rebuilt(graph, made, builder)


def _above(graph: Graph, below: set[Node]) -> set[Node]:
    """The nodes `below`, and all nodes that depend on one of them."""
    found = {*below}
    for node in graph.nodes:
        if not found.isdisjoint(node.args):
            found.add(node)
    return found


def _reduction_to_wait_for(node: Node, able: list[Node], graph: Graph, problem: Problem) -> Node | None:
    """The first reduction among `able` that has one result for each value that `node` reduces; None if none has."""

    def several(node: Node) -> list[Factor]:
        return [factor for factor in graph.types[node].factors if factor.size(problem.extents) != 1]

    reduced = node.args[0]
    is_one = not graph.types[reduced].factors
    return None if is_one else next((other for other in able if several(other) == several(reduced)), None)


def _waiting(value: Node, other: Node, builder: Builder) -> Node:
    """`value`, made to depend on `other`: other == other or other != other always holds, so the value is unchanged."""
    either = typed(builder, "logical_or", (typed(builder, "eq", (other, other)), typed(builder, "ne", (other, other))))
    if builder.types[value].kind == "mask":
        return typed(builder, "logical_and", (value, either))
    return typed(builder, "where", (either, value, value))
