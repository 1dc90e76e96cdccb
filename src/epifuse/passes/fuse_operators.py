"""Operator fusion: a sequence of operations that is the body of an activation becomes that activation.

The patterns are the activations' own bodies, so a new activation is recognised at once. A provider with a fast form
then uses it, and one without lowers it to the same sequence again: nothing is gained there, and nothing lost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import NamedTuple

from epifuse.frontend import activation_body
from epifuse.fusion.primitives import COMMUTATIVE
from epifuse.fusion.vocabulary import VOCABULARY
from epifuse.ir import Builder, Graph, Node, rewrite
from epifuse.ir.graph import applied, keep
from epifuse.passes.split_operators import has_costly_body
from epifuse.request.problem import Problem


class Pattern(NamedTuple):
    """An activation, its body's result, and its parameters as they stand in the body."""

    name: str
    root: Node
    parameters: tuple[Node, ...]
    size: int


def fuse_operators(graph: Graph, problem: Problem) -> Graph:
    """The graph with every sequence replaced whose inner values nobody else needs; the longest ones first."""
    found = dict(_found(graph))
    if not found:
        return graph
    made: dict[Node, Node] = {}

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        if old in found:
            name, arguments = found[old]
            made[old] = builder.node("call", *(made[argument] for argument in arguments), attr=name)
        else:
            made[old] = keep(old, args, builder)
        return made[old]

    return rewrite(graph, rule)


def _found(graph: Graph) -> Iterator[tuple[Node, tuple[str, tuple[Node, ...]]]]:
    """The last value of each sequence, with the activation it is and that activation's arguments."""
    uses = Counter(arg for node in graph.nodes for arg in node.args)
    uses.update(graph.roots)
    taken: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in taken or graph.types[node].kind != "float":
            continue
        for pattern in _patterns().get((node.op, node.attr), ()):
            held = _matched(pattern.root, node, {})
            if held is not None and _is_free(pattern, node, held, uses, graph):
                taken.update(inner for part, inner in held.items() if part.op not in ("load", "const"))
                yield node, (pattern.name, tuple(held[parameter] for parameter in pattern.parameters))
                break


def _is_free(pattern: Pattern, node: Node, held: Mapping[Node, Node], uses: Mapping[Node, int], graph: Graph) -> bool:
    """Whether only the sequence itself needs its inner values, and its arguments are floats."""
    inner = {value for part, value in held.items() if part.op not in ("load", "const")}
    within = Counter(arg for value in inner for arg in value.args)
    floats = all(graph.types[held[parameter]].kind == "float" for parameter in pattern.parameters)
    return floats and all(uses[value] == within[value] for value in inner - {node})


def _matched(part: Node, node: Node, held: Mapping[Node, Node]) -> Mapping[Node, Node] | None:
    """`held` with the nodes that stand for `part` and all below it; None where `node` is something else."""
    if part in held:
        return held if held[part] is node else None
    if part.op == "load":
        return {**held, part: node}
    if part.op == "const":
        return {**held, part: node} if node.op == "const" and _same_number(part.attr, node.attr) else None
    if (part.op, part.attr, len(part.args)) != (node.op, node.attr, len(node.args)):
        return None
    orders = (node.args, node.args[::-1]) if part.op in COMMUTATIVE else (node.args,)
    for order in orders:
        inner: Mapping[Node, Node] | None = held
        for below, arg in zip(part.args, order, strict=True):
            inner = _matched(below, arg, inner) if inner is not None else None
        if inner is not None:
            return {**inner, part: node}
    return None


def _same_number(one: float, other: float) -> bool:
    return one == other and math.copysign(1.0, one) == math.copysign(1.0, other)


# --- the patterns ------------------------------------------------------------------------------------------------


@cache
def _patterns() -> Mapping[tuple[str, object], tuple[Pattern, ...]]:
    """By the operation of their last value, the longest first. Each body as written, and with its calls opened."""
    found: dict[tuple[str, object], list[Pattern]] = {}
    for name, entry in VOCABULARY.items():
        # What takes cheap instructions only gains nothing by having a name.
        if entry.group != "activation" or not has_costly_body(name):
            continue
        bodies = (activation_body(name), _body(name, short=True), _body(name, short=False))
        for body in {str(body): body for body in bodies}.values():
            root = body.outputs[0].node
            loads = {node.attr.name: node for node in body.loads()}
            size = sum(node.op not in ("load", "const") for node in body.nodes)
            pattern = Pattern(name, root, tuple(loads[parameter] for parameter in body.inputs), size)
            if size > 1:
                found.setdefault((root.op, root.attr), []).append(pattern)
    return {key: tuple(sorted(rows, key=lambda row: -row.size)) for key, rows in found.items()}


def _body(name: str, *, short: bool) -> Graph:
    """An activation's body without calls; with `short`, without calls of what is one operation only."""

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        if old.op != "call":
            return keep(old, args, builder)
        inner = _body(str(old.attr), short=short)
        if short and sum(node.op not in ("load", "const") for node in inner.nodes) > 1:
            return keep(old, args, builder)
        return applied(inner, args, partial(keep, builder=builder))[inner.outputs[0].node]

    return rewrite(activation_body(name), rule)
