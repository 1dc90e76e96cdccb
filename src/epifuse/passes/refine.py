"""Refine: if reshapes have split an axis, write all values in the same finest factors of that axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from epifuse.base.errors import Loc, fail
from epifuse.ir import Builder, Dims, Factor, Graph, Load, Node, Type, rewrite
from epifuse.ir.types import canonical, factors_of
from epifuse.passes.alignment import removed
from epifuse.passes.dims import DimsError, expand, refine
from epifuse.passes.parts import places

Cuts = Mapping[str, tuple[int, ...]]


def refined(graph: Graph) -> Graph:
    """The graph over the finest factors; `graph` itself if no axis is split. Raises if two reshapes do not nest."""
    factors = canonical(factor for type_ in graph.types.values() for factor in type_.factors)
    dims = [factor for output in graph.outputs for factor in factors_of(output.dims or ())]
    gone = [factor for node in graph.nodes for factor in removed(node)]
    try:
        cuts = refine([*factors, *dims, *gone])
    except DimsError as error:
        raise fail(error.key, _place(graph), **error.values) from None
    if all(strides == (1,) for strides in cuts.values()):
        return graph

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        node = builder.node(old.op, *args, attr=_attr(old, cuts))
        type_ = graph.types[old]
        builder.types[node] = Type(type_.kind, canonical(expand(type_.factors, cuts)), type_.host)
        return node

    outputs = [output._replace(dims=_dims(output.dims or (), cuts)) for output in graph.outputs]
    return rewrite(replace(graph, outputs=tuple(outputs)), rule)


def _place(graph: Graph) -> Loc | None:
    """The source place of the first value whose factors do not nest with those of the values before it."""
    presented = [(output.node, factors_of(output.dims or ())) for output in graph.outputs]
    seen: dict[Factor, None] = {}
    for node, factors in (*((node, graph.types[node].factors) for node in graph.nodes), *presented):
        seen.update(dict.fromkeys(factors))
        try:
            refine(tuple(seen))
        except DimsError:
            return graph.loc(node)
    return None


def _dims(dims: Dims, cuts: Cuts) -> Dims:
    return tuple(expand(dim, cuts) for dim in dims)


def _attr(node: Node, cuts: Cuts) -> object:
    if isinstance(node.attr, Load) and node.attr.dims is not None:
        return node.attr._replace(dims=_dims(node.attr.dims, cuts))
    if node.op == "index":
        return expand(node.attr, cuts)
    if node.op in ("expand", "one_hot"):
        return canonical(expand(node.attr, cuts))
    if node.op == "pick":
        finer = (places(expand((factor,), cuts), place) for factor, place in node.attr)
        return tuple(pair for found in finer for pair in found)
    if node.op == "reduce":
        name, gone = node.attr
        return name, canonical(expand(gone, cuts))
    return node.attr
