"""Eliminate reductions whose result is known: of a value that is the same along an axis, and of a one-hot operand.

In a reduction threads have to exchange values; in arithmetic they do not. The sum of equal values is a product with
their number. This number is then a constant of the graph, which serves one size only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from epifuse.fusion.reduction import REDUCTIONS
from epifuse.ir import Builder, Factor, Graph, Node, Type, rewrite
from epifuse.ir.graph import keep
from epifuse.passes.canonicalise import constant, typed
from epifuse.passes.kinds import reduction_kind
from epifuse.request.problem import Problem


def counted_axes(graph: Graph) -> set[str]:
    """The axes along which this pass may replace a reduction of a typed graph by the number of its terms, as it does
    for the sum of `ones_like(x)`."""
    found: set[str] = set()
    for node in graph.nodes:
        if node.op == "reduce":
            (below,), (_, gone) = node.args, node.attr
            claims = any(arg.op == "one_hot" for arg in (below, *below.args))
            equal = gone if claims else below.attr if below.op == "expand" else ()
            found |= {factor.along for factor in gone if factor in equal}
    return found


def eliminate_reductions(graph: Graph, problem: Problem) -> Graph:
    """The graph without reductions whose result is known. It contains no `expand` and no `one_hot` nodes."""
    if not any(node.op in ("expand", "one_hot") for node in graph.nodes):
        return graph
    made: dict[Node, Node] = {}

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        made[old] = _rewritten(_Reduction(old, graph, problem, builder, made), args)
        return made[old]

    return rewrite(graph, rule)


class _Reduction(NamedTuple):
    """The node `old` of `graph`, and what its rewriting needs. `made` maps old nodes to new ones."""

    old: Node
    graph: Graph
    problem: Problem
    builder: Builder
    made: Mapping[Node, Node]

    def count(self, factors: Iterable[Factor]) -> int:
        """The number of elements along `factors`."""
        return math.prod(factor.size(self.problem.extents) for factor in factors)


def _rewritten(at: _Reduction, args: tuple[Node, ...]) -> Node:
    if at.old.op == "one_hot":
        return args[0]
    if at.old.op == "expand":  # not below a reduction: for instance an output that is the same along an axis
        return _varying(args[0], at.old.attr, at.builder)
    if at.old.op != "reduce":
        return keep(at.old, args, at.builder)
    below = at.old.args[0]
    found = None
    if below.op == "expand":
        found = _of_equal_values(at)
    elif below.op == "one_hot":
        found = _of_one_hot(at, below.attr)
    elif below.op == "mul":
        found = _of_chosen(at, below)
    return keep(at.old, args, at.builder) if found is None else found


def _of_equal_values(at: _Reduction) -> Node:
    """The reduction of a value that is the same along an axis: the result for one element, repeated arithmetically."""
    (name, gone), same = at.old.attr, at.old.args[0].attr
    value = at.made[at.old.args[0].args[0]]
    if at.graph.types[at.old].kind != "float" or not set(same) <= set(gone):
        return _reduced(name, gone, _varying(value, same, at.builder), at.builder)
    rest = tuple(factor for factor in gone if factor not in same)
    return _repeated(name, _reduced(name, rest, value, at.builder), at.count(same), at.builder)


def _of_one_hot(at: _Reduction, along: tuple[Factor, ...]) -> Node | None:
    """The reduction of a one-hot operand: a number that is known without its data. None if this one is not known."""
    name, gone = at.old.attr
    of_ones = REDUCTIONS[name].of_ones
    if of_ones is None or not set(along) <= set(gone):
        return None
    number = of_ones(at.count(factor for factor in gone if factor not in along))
    return _varying(constant(number, at.builder), at.graph.types[at.old].factors, at.builder)


def _of_chosen(at: _Reduction, product: Node) -> Node | None:
    """The sum of a one-hot operand times a value that is the same along the one-hot axis: the value itself. None for
    any other product."""
    name, gone = at.old.attr
    for claim, other in (product.args, product.args[::-1]):
        if name != "sum" or claim.op != "one_hot" or at.graph.types[other].kind != "float":
            continue
        held, along = at.graph.types[other].factors, set(claim.attr)
        if along <= set(gone) and not along & set(held):
            rest = [factor for factor in gone if factor not in along]
            value = _reduced(name, tuple(f for f in rest if f in held), at.made[other], at.builder)
            value = _repeated(name, value, at.count(f for f in rest if f not in held), at.builder)
            missing = tuple(f for f in at.graph.types[at.old].factors if f not in held)
            return _varying(value, missing, at.builder)
    return None


def _reduced(name: str, gone: tuple[Factor, ...], value: Node, builder: Builder) -> Node:
    """`value` reduced over `gone`. If `gone` is empty: the reduction of one float."""
    if gone:
        type_ = builder.types[value]
        node = builder.node("reduce", value, attr=(name, gone))
        factors = tuple(factor for factor in type_.factors if factor not in gone)
        builder.types.setdefault(node, Type(reduction_kind(name, type_.kind), factors))
        return node
    of_one = REDUCTIONS[name].of_one
    if of_one == "square":
        return typed(builder, "mul", (value, value))
    return typed(builder, "abs", (value,)) if of_one == "size" else value


def _repeated(name: str, value: Node, count: int, builder: Builder) -> Node:
    """The reduction of `count` equal values; `value` is the reduction of one of them."""
    how, number_of = REDUCTIONS[name].of_equal
    op, nothing_changes = _REPEATS[how]
    number = number_of(count)
    return value if number == nothing_changes else typed(builder, op, (value, constant(number, builder)))


_REPEATS = {"times": ("mul", 1.0), "plus": ("add", 0.0), "power": ("pow", 1.0)}
"""For each way to repeat a value: the primitive, and the number with which it changes nothing."""


def _varying(value: Node, factors: tuple[Factor, ...], builder: Builder) -> Node:
    """`value`, made to vary over `factors` by a `where` that is always true. It serves outputs, and reductions of kinds
    that have no product to replace them."""
    for factor in factors:
        index = builder.node("index", attr=(factor,))
        builder.types.setdefault(index, Type("int32", (factor,)))
        there = typed(builder, "ge", (index, constant(0, builder)))
        value = typed(builder, "where", (there, value, value))
    return value
