"""Reductions of operands alone, as the number of rows that count: after all tiles, beside what was reduced of the rows.

A tile reduces what it computes, and what varies over rows alone is in many tiles. Where the epilogue reduces its rows
as well, the operand is read with their results, one value a row, and reduced with them. Imports no cutlass.
"""

from __future__ import annotations

from epifuse.ir import Builder, Graph, Node, rewrite
from epifuse.ir.graph import keep
from epifuse.ir.types import Type
from epifuse.passes.canonicalise import typed


def beside_rows(graph: Graph) -> Graph:
    """The graph in which reductions of operands alone wait for a reduction of the product with a value for each."""
    of_product = _of_product(graph)
    alone = {
        node: found
        for node in graph.nodes
        if node.op == "reduce" and node.args[0] not in of_product and (found := _beside(node, graph, of_product))
    }
    if not alone:
        return graph
    made: dict[Node, Node] = {}

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        if old in alone:
            new = builder.node("reduce", _waiting(args[0], made[alone[old]], builder), attr=old.attr)
        else:
            new = keep(old, args, builder)
        made[old] = new
        return new

    return rewrite(graph, rule)


def _of_product(graph: Graph) -> set[Node]:
    """What needs the product."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "accum" or not found.isdisjoint(node.args):
            found.add(node)
    return found


def _beside(node: Node, graph: Graph, of_product: set[Node]) -> Node | None:
    """A reduction of the product that has a value for each that `node` reduces, and comes before it."""
    factors = graph.types[node.args[0]].factors
    if len(factors) != 1 or not graph.types[node.args[0]].axes <= {"m", "n"}:
        return None
    for other in graph.nodes:
        if other is node:
            return None
        if other.op == "reduce" and other in of_product and graph.types[other] == Type("float", factors):
            return other
    return None


def _waiting(value: Node, other: Node, builder: Builder) -> Node:
    """The same value, which is not there before the other: whatever that is, one of these holds."""
    either = typed(builder, "logical_or", (typed(builder, "eq", (other, other)), typed(builder, "ne", (other, other))))
    if builder.types[value].kind == "mask":
        return typed(builder, "logical_and", (value, either))
    return typed(builder, "where", (either, value, value))
