"""Operator fusion: a sequence of operations that is the body of an activation becomes that activation.

The patterns are the activations' own bodies, so a new activation is recognised without further code. A provider with a
fast form of the activation then uses it. A provider without one lowers it to the same sequence again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from inspect import signature
from typing import NamedTuple

from epifuse.frontend import activation_body, body_of
from epifuse.fusion.activation import SPELLINGS
from epifuse.fusion.operations import COMMUTATIVE
from epifuse.fusion.vocabulary import VOCABULARY, ours
from epifuse.ir import Builder, Graph, Node, Type, rewrite
from epifuse.ir.graph import applied, keep
from epifuse.passes.canonicalise import canonical_form, constant
from epifuse.passes.kinds import kinds_of_body
from epifuse.passes.split_operators import has_costly_body
from epifuse.request.problem import Problem


class Pattern(NamedTuple):
    """A body of the activation `name`: its result `root`, and its number of operations `size`. `parameters` are, in the
    activation's order, the body's loads, or the default of a parameter that the body does not load."""

    name: str
    root: Node
    parameters: tuple[Node | float, ...]
    size: int


def fuse_operators(graph: Graph, problem: Problem) -> Graph:
    """The graph with each sequence replaced whose inner values nothing else needs. Longer sequences are tried first."""
    found = dict(_found(graph))
    if not found:
        return graph
    made: dict[Node, Node] = {}

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        if old in found:
            name, arguments = found[old]
            given = (made[each] if isinstance(each, Node) else constant(each, builder) for each in arguments)
            made[old] = builder.node("call", *given, attr=name)
        else:
            made[old] = keep(old, args, builder)
        return made[old]

    return rewrite(graph, rule)


def _found(graph: Graph) -> Iterator[tuple[Node, tuple[str, tuple[Node | float, ...]]]]:
    """Yield the last node of each sequence, with the name of its activation and the arguments of the call."""
    uses = Counter(arg for node in graph.nodes for arg in node.args)
    uses.update(graph.roots)
    patterns = _patterns({str(node.attr) if node.op == "call" else node.op for node in graph.nodes})
    taken: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in taken or graph.types[node].kind != "float":
            continue
        for pattern in patterns.get((node.op, node.attr), ()):
            held = _matched(pattern.root, node, {})
            if held is not None and _is_free(pattern, node, held, uses, graph):
                taken.update(inner for part, inner in held.items() if part.op not in ("load", "const"))
                given = (held[each] if isinstance(each, Node) else each for each in pattern.parameters)
                yield node, (pattern.name, tuple(given))
                break


def _is_free(pattern: Pattern, node: Node, held: Mapping[Node, Node], uses: Mapping[Node, int], graph: Graph) -> bool:
    """Whether nothing outside of the sequence needs its inner values, and all its arguments are floats."""
    inner = {value for part, value in held.items() if part.op not in ("load", "const")}
    within = Counter(arg for value in inner for arg in value.args)
    floats = all(graph.types[held[each]].kind == "float" for each in pattern.parameters if isinstance(each, Node))
    return floats and all(uses[value] == within[value] for value in inner - {node})


def _matched(part: Node, node: Node, held: Mapping[Node, Node]) -> Mapping[Node, Node] | None:
    """`held`, which maps nodes of the pattern to nodes of the graph, extended by `part` and all below it. None if
    `node` does not match `part`."""
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


def _patterns(present: Container[str]) -> Mapping[tuple[str, object], Sequence[Pattern]]:
    """The patterns that a graph with the operations `present` can contain, by root op and `attr`, longest first."""
    found: dict[tuple[str, object], list[Pattern]] = {}
    for name, entry in VOCABULARY.items():
        functions = entry.function, *SPELLINGS.get(name, ())
        if entry.group == "activation" and any(_may_stand(function, present) for function in functions):
            for pattern in _patterns_of(name):
                found.setdefault((pattern.root.op, pattern.root.attr), []).append(pattern)
    return {key: sorted(rows, key=lambda row: -row.size) for key, rows in found.items()}


def _may_stand(function: Callable[..., object], present: Container[str]) -> bool:
    """Whether all primitives that an activation's code names are present. To read all bodies would take 9 ms."""
    names, known = function.__code__.co_names, function.__globals__
    absent = [other for name in names if (other := ours(known.get(name))) is not None and other.name not in present]
    return all(
        _may_stand(other.function, present) if other.group == "activation" else other.group != "primitive"
        for other in absent
    )


@cache
def _patterns_of(name: str) -> tuple[Pattern, ...]:
    """An activation's body as written, and with inner calls replaced by their bodies. Empty if all its instructions are
    cheap, because a fast form then gains nothing.

    All patterns are in canonical form, as is the graph in which they are looked for. A call with default parameters
    holds `x * 1.0`, for instance, which the graph does not.
    """
    if not has_costly_body(name):
        return ()
    bodies = [activation_body(name)]
    if any(node.op == "call" for node in bodies[0].nodes):
        bodies += _opened(name, short=True), _opened(name, short=False)
    bodies += [body_of(function, name) for function in SPELLINGS.get(name, ())]
    given = signature(VOCABULARY[name].function).parameters.values()
    defaults = {each.name: each.default for each in given if each.default is not each.empty}
    found = []
    for body in {str(body): body for body in map(_canonical, bodies)}.values():
        loads = {node.attr.name: node for node in body.loads()}
        size = sum(node.op not in ("load", "const") for node in body.nodes)
        if size > 1:
            parameters = tuple(loads[each] if each in loads else defaults[each] for each in bodies[0].inputs)
            found.append(Pattern(name, body.outputs[0].node, parameters, size))
    return tuple(found)


def _canonical(body: Graph) -> Graph:
    """The body for float arguments, in canonical form."""
    kinds = kinds_of_body(body, ["float"] * len(body.inputs))
    return canonical_form(replace(body, types={node: Type(kind) for node, kind in kinds.items()}))


def _opened(name: str, *, short: bool) -> Graph:
    """An activation's body with its calls replaced by their bodies; with `short`, only calls of a single operation."""

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        if old.op != "call":
            return keep(old, args, builder)
        inner = _opened(str(old.attr), short=short)
        if short and sum(node.op not in ("load", "const") for node in inner.nodes) > 1:
            return keep(old, args, builder)
        return applied(inner, args, partial(keep, builder=builder))[inner.outputs[0].node]

    return rewrite(activation_body(name), rule)
