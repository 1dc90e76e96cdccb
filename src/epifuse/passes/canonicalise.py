"""Rewrite operations to one form if the bits stay the same: `x * 1` to x, `x ** 2` to `x * x`, `x / 4` to `x * .25`."""

from __future__ import annotations

import math

from epifuse.fusion.primitives import PRIMITIVES
from epifuse.ir import Builder, Graph, Node, Type, rewrite
from epifuse.ir.graph import keep
from epifuse.ir.types import canonical
from epifuse.passes.kinds import const_kind, primitive_kind
from epifuse.request.problem import Problem


def canonicalise(graph: Graph, problem: Problem) -> Graph:
    """The pass; see `canonical_form`. The problem is not used."""
    return canonical_form(graph)


def canonical_form(graph: Graph) -> Graph:
    """The typed graph in canonical form. One pass from the loads upwards suffices: each rule gives a canonical node."""

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        if old.op not in PRIMITIVES or old not in graph.types or graph.types[old].host:
            return keep(old, args, builder)
        args = _unspread(_float_constants(old, args, builder), builder, graph.types[old])
        return _simplified(old, args, builder, graph.types[old]) or builder.node(old.op, *args, attr=old.attr)

    return rewrite(graph, rule)


def _float_constants(old: Node, args: tuple[Node, ...], builder: Builder) -> tuple[Node, ...]:
    """The arguments, with integer literals as floats if one is a float: `x * 2` then equals `x * 2.0`."""
    values = args[1:] if old.op == "where" else args
    if not any(builder.types[arg].kind == "float" for arg in values):
        return args
    return tuple(_as_float(arg, builder) if arg in values else arg for arg in args)


def _unspread(args: tuple[Node, ...], builder: Builder, result: Type) -> tuple[Node, ...]:
    """The arguments without `expand`, if they vary over all factors of the result without it, as `zeros_like(x)` does
    beside x. Broadcasting then needs no `expand`."""
    plain = tuple(arg.args[0] if arg.op == "expand" else arg for arg in args)
    varies = canonical(factor for arg in plain for factor in builder.types[arg].factors) == result.factors
    return plain if varies else args


def _as_float(arg: Node, builder: Builder) -> Node:
    if arg.op != "const" or isinstance(arg.attr, float):
        return arg
    return constant(float(arg.attr), builder)


def _simplified(old: Node, args: tuple[Node, ...], builder: Builder, result: Type) -> Node | None:
    same = builder.types[args[0]] == result
    match old.op, args:
        case ("mul" | "div" | "pow", (x, Node("const", (), 1 | 1.0))) if same:
            return x
        case ("mul", (Node("const", (), 1 | 1.0), x)) if builder.types[x] == result:
            return x
        # x - 0 keeps -0.0. x + 0 turns it into 0.0, and is not simplified.
        case ("sub", (x, Node("const", (), 0 | 0.0 as zero))) if same and math.copysign(1.0, zero) > 0:
            return x
        case ("neg", (Node("neg", (x,)),)) | ("logical_not", (Node("logical_not", (x,)),)):
            return x
        case ("where", (Node("const", (), bool() as holds), x, y)) if builder.types[x if holds else y] == result:
            return x if holds else y
        case ("pow", (x, Node("const", (), 2 | 2.0))) if same:
            return builder.node("mul", x, x)
        # PyTorch takes a root here too: it gives NaN for -infinity, and sqrt gives -0.0 for -0.0.
        case ("pow", (x, Node("const", (), 0.5 | -0.5 as power))) if same and result.kind == "float":
            return builder.node("sqrt" if power > 0 else "rsqrt", x)
        case ("div", (x, Node("const", (), float() as divisor))) if result.kind == "float" and _is_power_of_two(
            divisor
        ):
            return builder.node("mul", x, constant(1.0 / divisor, builder))
    return None


def _is_power_of_two(value: float) -> bool:
    # The bounds keep both the number and its inverse normal in float32, so that the product is exact.
    return math.isfinite(value) and abs(math.frexp(value)[0]) == 0.5 and 2.0**-100 < abs(value) < 2.0**100


def constant(value: float, builder: Builder) -> Node:
    """The node of a constant, with its type."""
    node = builder.node("const", attr=value)
    builder.types.setdefault(node, Type(const_kind(value)))
    return node


def typed(builder: Builder, op: str, args: tuple[Node, ...]) -> Node:
    """An elementwise primitive, with the type that follows from its arguments' types."""
    node = builder.node(op, *args)
    if node not in builder.types:
        types = [builder.types[arg] for arg in args]
        factors = canonical(factor for type_ in types for factor in type_.factors)
        builder.types[node] = Type(primitive_kind(op, [type_.kind for type_ in types]), factors)
    return node
