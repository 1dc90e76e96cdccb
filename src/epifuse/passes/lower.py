"""Lower: activations the chosen provider has no fast form for become their bodies."""

from __future__ import annotations

from collections.abc import Mapping

from epifuse.frontend import activation_body
from epifuse.ir import Builder, Graph, Node, Type, rewrite
from epifuse.ir.graph import keep
from epifuse.ir.types import canonical
from epifuse.passes.canonicalise import typed
from epifuse.passes.kinds import const_kind


def lower(graph: Graph, native: frozenset[str]) -> Graph:
    """Inline the body of every activation that is not in `native`, or that works on integers here."""

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        if old.op != "call":
            return keep(old, args, builder)
        if old.attr in native and all(builder.types[arg].kind == "float" for arg in args):
            return keep(old, args, builder)
        return inlined(str(old.attr), args, builder, native)

    return rewrite(graph, rule)


def _call(name: str, operands: tuple[Node, ...], builder: Builder) -> Node:
    node = builder.node("call", *operands, attr=name)
    factors = canonical(factor for operand in operands for factor in builder.types[operand].factors)
    builder.types.setdefault(node, Type("float", factors))
    return node


def inlined(name: str, args: tuple[Node, ...], builder: Builder, native: frozenset[str]) -> Node:
    """The body over these arguments; bodies use activations too, a few levels deep."""
    body = activation_body(name)
    given: Mapping[str, Node] = dict(zip(body.inputs, args, strict=True))
    made: dict[Node, Node] = {}
    for node in body.nodes:
        operands = tuple(made[arg] for arg in node.args)
        if node.op == "load":
            made[node] = given[node.attr.name]
        elif node.op == "const":
            made[node] = builder.node("const", attr=node.attr)
            builder.types.setdefault(made[node], Type(const_kind(node.attr)))
        elif node.op == "call" and node.attr in native and all(builder.types[o].kind == "float" for o in operands):
            made[node] = _call(str(node.attr), operands, builder)
        elif node.op == "call":
            made[node] = inlined(str(node.attr), operands, builder, native)
        else:
            made[node] = typed(builder, node.op, operands)
    return made[body.outputs[0].node]
