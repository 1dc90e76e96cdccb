"""Eliminate reductions that are known: of a value that is the same along an axis, and of a one-hot operand.

Reductions need threads to meet; arithmetic does not. The sum of a value that does not vary is a product.
"""

from __future__ import annotations

import math

from epifuse.fusion.reduction import REDUCTIONS
from epifuse.ir import Builder, Factor, Graph, Node, Type, rewrite
from epifuse.ir.graph import keep
from epifuse.passes.canonicalise import typed
from epifuse.problem import Problem


def eliminate_reductions(graph: Graph, problem: Problem) -> Graph:
    """The graph without reductions over axes along which their argument is the same; afterwards nothing is `expand`."""

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        if old.op != "reduce" or args[0].op != "expand":
            return keep(old, args, builder)
        (name, gone), (value,), same = old.attr, args[0].args, args[0].attr
        if graph.types[old].kind == "float" and set(same) <= set(gone):
            rest = tuple(factor for factor in gone if factor not in same)
            count = math.prod(factor.size(problem.extents) for factor in same)
            return _repeated(name, _reduced(name, rest, value, builder), count, builder)
        return _reduced(name, gone, _varying(value, same, builder), builder)

    return rewrite(graph, rule)


def _reduced(name: str, gone: tuple[Factor, ...], value: Node, builder: Builder) -> Node:
    """`value` reduced over `gone`, or what the reduction of one element is."""
    if gone:
        type_ = builder.types[value]
        node = builder.node("reduce", value, attr=(name, gone))
        kind = "mask" if REDUCTIONS[name].rule == "mask" else type_.kind
        wide = REDUCTIONS[name].rule == "sum" and kind != "float"
        factors = tuple(factor for factor in type_.factors if factor not in gone)
        builder.types.setdefault(node, Type("int64" if wide else kind, factors))
        return node
    if name == "sum_of_squares":
        return typed(builder, "mul", (value, value))
    return typed(builder, "abs", (value,)) if name in ("norm", "absmax") else value


_TIMES = {"sum": float, "sum_of_squares": float, "norm": math.sqrt}


def _repeated(name: str, value: Node, count: int, builder: Builder) -> Node:
    """The reduction of `count` equal values, given that of one."""
    if name == "logsumexp":
        return typed(builder, "add", (value, _const(math.log(count) if count else -math.inf, builder)))
    if count == 0 and name == "mean":
        return typed(builder, "mul", (value, _const(math.nan, builder)))
    if name in _TIMES or count == 0:
        return typed(builder, "mul", (value, _const(_TIMES.get(name, float)(count), builder)))
    return value


def _varying(value: Node, factors: tuple[Factor, ...], builder: Builder) -> Node:
    """`value` in a form that varies over `factors`: for kinds that have no product of their own."""
    for factor in factors:
        index = builder.node("index", attr=(factor,))
        builder.types.setdefault(index, Type("int32", (factor,)))
        there = typed(builder, "ge", (index, _const(0, builder)))
        value = typed(builder, "where", (there, value, value))
    return value


def _const(value: float, builder: Builder) -> Node:
    node = builder.node("const", attr=value)
    builder.types.setdefault(node, Type("int32" if isinstance(value, int) else "float"))
    return node
