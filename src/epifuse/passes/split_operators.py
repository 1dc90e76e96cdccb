"""Operator fission: replace an activation by its body if the body holds another activation that is computed anyway.

`silu(x)` beside `sigmoid(x)`, or beside `dsilu(dy, x)`, becomes `x * sigmoid(x)`: one exponential instead of two. This
is for kernels that compute in registers. If each operation is a pass over memory, a fast form of the whole costs less.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

from epifuse.frontend import activation_body
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.vocabulary import VOCABULARY
from epifuse.ir import Builder, Graph, Node, rewrite
from epifuse.ir.graph import applied, keep
from epifuse.passes.lower import inlined
from epifuse.request.problem import Problem


@cache
def has_costly_body(name: str) -> bool:
    """Whether an activation's body, or that of an activation inside it, has a primitive that is marked as costly."""
    return any(
        has_costly_body(str(node.attr)) if node.op == "call" else node.op in PRIMITIVES and PRIMITIVES[node.op].costly
        for node in activation_body(name).nodes
    )


_ACTIVATIONS = frozenset(name for name, entry in VOCABULARY.items() if entry.group == "activation")


def split_operators(graph: Graph, problem: Problem) -> Graph:
    """The graph with activations replaced by their bodies if they share a costly activation with other values."""
    opened = _sharing(graph)
    if not opened:
        return graph

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        return inlined(str(old.attr), args, builder, _ACTIVATIONS) if old in opened else keep(old, args, builder)

    return rewrite(graph, rule)


def _sharing(graph: Graph) -> set[Node]:
    """The calls whose body holds a costly call that also stands in the graph, or in the body of another call."""
    builder = Builder()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        copies[node] = keep(node, tuple(copies[arg] for arg in node.args), builder)
    present = set(copies.values())
    owners: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call" and all(graph.types[arg].kind == "float" for arg in node.args):
            for part in _calls_inside(copies[node], builder):
                owners.setdefault(part, []).append(node)
    return {call for part, calls in owners.items() if part in present or len(calls) > 1 for call in calls}


def _calls_inside(call: Node, builder: Builder) -> Iterator[Node]:
    made = applied(activation_body(str(call.attr)), call.args, partial(keep, builder=builder))
    return (made[node] for node in made if node.op == "call" and has_costly_body(str(node.attr)))
