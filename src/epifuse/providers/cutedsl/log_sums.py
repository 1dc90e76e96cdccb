"""Sum the logarithms in softplus and logsigmoid separately: a sum of logarithms is the logarithm of a product.

softplus(x) is max(x, 0) + log1p(exp(-|x|)), and logsigmoid(x) is min(x, 0) - log1p(exp(-|x|)). If only a sum or a mean
reads one of them, its logarithms are summed separately (`kernels.reduce`). This takes two instructions for each value
and one logarithm for up to 64 values; a logarithm of each value is a polynomial of ten terms. Imports no cutlass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from typing import NamedTuple

from epifuse.ir import Builder, Graph, Node, rewrite
from epifuse.ir.graph import keep
from epifuse.passes.canonicalise import constant, typed

LOGARITHM_SUMS = {"sum": "sum_log1p_exp", "mean": "mean_log1p_exp"}
_BENT = {"softplus": ("maximum", "add"), "logsigmoid": ("minimum", "sub")}
"""By activation: the function of x and 0 beside its logarithm, and the operation that joins the two."""
_OPPOSITE = {"add": "sub", "sub": "add"}


class _Parts(NamedTuple):
    """A value as `bare` plus or minus (`join`) log1p(exp(`exponent`)). `bare` is None for a logarithm alone."""

    bare: Node | None
    join: str
    exponent: Node


def split_log_sums(graph: Graph) -> Graph:
    """Return the graph with the first logarithm in each sum or mean reduced separately."""
    ways = _ways(graph)
    sums = {n for n in graph.nodes if n.op == "reduce" and n.attr[0] in LOGARITHM_SUMS and n.args[0] in ways}
    if not sums:
        return graph
    parts: dict[Node, _Parts] = {}

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        if old in ways:
            parts[old] = _split(old, args, ways[old], parts, builder)
        return _two_sums(old, graph, parts[old.args[0]], builder) if old in sums else keep(old, args, builder)

    return rewrite(graph, rule)


def _ways(graph: Graph) -> dict[Node, int]:
    """Return the values that contain a logarithm, and for each the position of the argument that contains it, or -1 if
    the value itself computes it.

    Only values that are used once are returned, because any other user needs the whole value.
    """
    uses = Counter(arg for node in graph.nodes for arg in node.args)
    uses.update(graph.roots)
    ways: dict[Node, int] = {}
    alone: set[Node] = set()  # logarithms with nothing beside them
    for node in graph.nodes:
        if uses[node] != 1:
            continue
        if _is_by_logarithm(node):
            ways[node] = -1
            if node.op == "log1p":
                alone.add(node)
        elif node.op in ("add", "sub", "neg") and (way := _way(node, ways, alone, graph)) is not None:
            ways[node] = way
            if node.op == "neg" and node.args[0] in alone:
                alone.add(node)
    return ways


def _way(node: Node, ways: Mapping[Node, int], alone: Container[Node], graph: Graph) -> int | None:
    """The position of the first argument with a logarithm that can be split off, or None. The argument must be a float
    with the factors of `node`. If it is a logarithm alone, the other arguments must be so too: they become `bare`."""

    def stands(arg: Node) -> bool:
        return graph.types[arg].kind == "float" and graph.types[arg].factors == graph.types[node].factors

    for i, arg in enumerate(node.args):
        others = (*node.args[:i], *node.args[i + 1 :])
        if arg in ways and stands(arg) and (arg not in alone or all(map(stands, others))):
            return i
    return None


def _is_by_logarithm(node: Node) -> bool:
    match node:
        case Node("log1p", (Node("exp", (Node("neg", (Node("abs"),)),)),)):
            return True
    if node.op != "call" or node.attr not in _BENT:
        return False
    if node.attr == "logsigmoid":
        return True
    # With another beta the logarithm is divided. With a low threshold softplus is x where the logarithm still counts.
    _, beta, threshold = (arg.attr if arg.op == "const" else None for arg in node.args)
    return beta in (1, 1.0) and threshold is not None and threshold >= 15


def _split(old: Node, args: tuple[Node, ...], way: int, parts: dict[Node, _Parts], builder: Builder) -> _Parts:
    if old.op == "log1p":
        return _Parts(None, "add", args[0].args[0])
    if way < 0:
        bent, join = _BENT[str(old.attr)]
        zero = constant(0.0, builder)
        exponent = typed(builder, "neg", (typed(builder, "abs", args[:1]),))
        return _Parts(typed(builder, bent, (args[0], zero)), join, exponent)
    below = parts[old.args[way]]
    taken = old.op == "neg" or (old.op == "sub" and way == 1)
    others = (*args[:way], *args[way + 1 :])
    if below.bare is not None:
        bare: Node | None = typed(builder, old.op, (*args[:way], below.bare, *args[way + 1 :]))
    elif others and old.op == "sub" and way == 0:
        bare = typed(builder, "neg", others)
    else:
        bare = others[0] if others else None
    return below._replace(bare=bare, join=_OPPOSITE[below.join] if taken else below.join)


def _two_sums(old: Node, graph: Graph, parts: _Parts, builder: Builder) -> Node:
    name, gone = old.attr

    def reduced(name: str, value: Node) -> Node:
        node = builder.node("reduce", value, attr=(name, gone), locs=graph.locs.get(old, ()))
        builder.types[node] = graph.types[old]
        return node

    logarithms = reduced(LOGARITHM_SUMS[name], parts.exponent)
    if parts.bare is not None:
        return typed(builder, parts.join, (reduced(name, parts.bare), logarithms))
    return logarithms if parts.join == "add" else typed(builder, "neg", (logarithms,))
