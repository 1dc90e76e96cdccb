"""Verify: the rules of a legal typed graph, checked after every pass. A failure is a fault of the library."""

from __future__ import annotations

from collections.abc import Iterator

from epifuse.base.errors import fail
from epifuse.fusion.operations import broken
from epifuse.ir import Graph, Node
from epifuse.ir.graph import topological
from epifuse.ir.types import canonical, factors_of
from epifuse.passes.alignment import removed


def verify(name: str, before: Graph, after: Graph) -> None:
    """Raise `InternalError` with both graphs if `after`, which is typed, breaks a rule."""
    for rule in _broken(after):
        raise fail("verify", None, name=name, rule=rule, before=before, after=after)


def verify_written(graph: Graph) -> None:
    """Raise `InternalError` if a node that a front end wrote does not have the form of its operation."""
    for node in topological((*graph.roots, *graph.checked)):
        if (rule := broken(node, "written")) is not None:
            raise fail("verify", None, name="parse", rule=rule, before="source", after=graph)


def _broken(graph: Graph) -> Iterator[str]:
    seen: set[Node] = set()
    for node in graph.nodes:
        if any(arg not in seen for arg in node.args):
            yield f"{node} stands before its argument"
        seen.add(node)
        if node not in graph.types:
            yield f"{node} has no type"
        elif graph.types[node].host:
            yield f"{node} is a host number among the kernel's values"
        else:
            yield from _broken_node(graph, node)
    for node in topological(graph.hosts.values()):
        if (rule := broken(node, "host")) is not None:
            yield rule
    for output in graph.outputs:
        # A value of shape () may still vary over factors of extent one, but has no dim that could hold them.
        if output.dims is None or (output.dims and factors_of(output.dims) != graph.types[output.node].factors):
            yield f"output {output.name} has dims {output.dims}"


def _broken_node(graph: Graph, node: Node) -> Iterator[str]:
    if (rule := broken(node, "typed")) is not None:
        yield rule
    added = node.attr if node.op == "expand" else ()
    given = canonical([*added, *(factor for arg in node.args for factor in graph.types[arg].factors)])
    factors = graph.types[node].factors
    if node.op == "load":
        if node.attr.dims is None or factors_of(node.attr.dims) != factors:
            yield f"{node} does not say how it is read"
    elif node.op in ("reduce", "pick"):
        gone = set(removed(node))
        if not gone <= set(given) or set(factors) != set(given) - gone:
            yield f"{node} reduces {gone} of {given} to {factors}"
    elif node.op == "region":
        if {f for f in factors if f.along != "n"} != {f for f in given if f.along != "n"}:
            yield f"{node} takes columns of {given}, and has {factors}"
    elif node.args and factors != given:
        yield f"{node} varies over {factors}, its arguments over {given}"
