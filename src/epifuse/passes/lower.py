"""Lower: replace activations for which the chosen provider has no fast form by their bodies."""

from __future__ import annotations

from epifuse.frontend import activation_body
from epifuse.ir import Builder, Graph, Node, Type, rewrite
from epifuse.ir.graph import applied, keep
from epifuse.ir.types import canonical
from epifuse.passes.canonicalise import typed
from epifuse.passes.kinds import const_kind


def lower(graph: Graph, native: frozenset[str]) -> Graph:
    """Inline the body of every activation that is not in `native`, or has an argument that is not a float."""

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
    """The result of the activation's body for these arguments. Calls inside the body are treated as in `lower`."""

    def make(node: Node, operands: tuple[Node, ...]) -> Node:
        if node.op == "const":
            made = builder.node("const", attr=node.attr)
            builder.types.setdefault(made, Type(const_kind(node.attr)))
            return made
        if node.op != "call":
            return typed(builder, node.op, operands)
        if node.attr in native and all(builder.types[operand].kind == "float" for operand in operands):
            return _call(str(node.attr), operands, builder)
        return inlined(str(node.attr), operands, builder, native)

    body = activation_body(name)
    return applied(body, args, make)[body.outputs[0].node]
