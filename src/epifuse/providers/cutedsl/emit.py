"""The emitter walks the typed graph while the kernel is traced, and computes a fragment for each node.

It knows no architecture, and writes no source text.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cutlass.cute as cute

from epifuse.fusion.primitives import PRIMITIVES
from epifuse.ir import Graph, Node
from epifuse.providers.cutedsl.device_types import HELD
from epifuse.providers.cutedsl.precision import Accuracy
from epifuse.providers.cutedsl.primitives import row
from epifuse.providers.cutedsl.store_math import as_kind, cast

Fragment = Any


def walk(
    graph: Graph,
    leaf: Callable[[Node], Fragment],
    like: Fragment,
    accuracy: Mapping[Node, Accuracy] | None = None,
    nodes: Iterable[Node] | None = None,
    known: Mapping[Node, Fragment] | None = None,
) -> Mapping[Node, Fragment]:
    """Return the fragments of `nodes` (None: of all nodes), together with those that are `known` already.

    `leaf` gives the fragment of a node that is not computed from fragments: a reduction, a pick, or a node without
    arguments that is no constant. Fragments have the shape of `like`. `accuracy` says how exactly values must be
    computed (`precision.accuracies`); a node that is not in it is computed in full.
    """
    values: dict[Node, Fragment] = dict(known or {})
    for node in graph.nodes if nodes is None else nodes:
        if node.op == "const":
            values[node] = _constant(node, like, graph)
        elif not node.args or node.op in ("reduce", "pick"):
            values[node] = leaf(node)
        else:
            values[node] = _computed(node, graph, values, (accuracy or {}).get(node, "full"))
    return values


def _computed(node: Node, graph: Graph, values: Mapping[Node, Fragment], accuracy: Accuracy) -> Fragment:
    kind = _common_kind(node, graph)
    args = (
        [values[arg] for arg in node.args]
        if node.op in _RANDOM
        else [
            values[arg] if node.op == "where" and i == 0 else as_kind(values[arg], graph.types[arg].kind, kind)
            for i, arg in enumerate(node.args)
        ]
    )
    if node.op == "cast":
        return cast(args[0], node.attr)
    if node.op == "expand":
        return args[0]
    name = str(node.attr) if node.op == "call" else node.op
    literals = tuple(arg.attr if arg.op == "const" else None for arg in node.args)
    return row(name, accuracy, graph.types[node].kind, literals)(*args)


def _constant(node: Node, like: Fragment, graph: Graph) -> Fragment:
    if isinstance(node.attr, bool):
        return cute.full_like(like, 1.0 if node.attr else 0.0, HELD["float"]) != 0.0
    return cute.full_like(like, node.attr, HELD[graph.types[node].kind])


def _common_kind(node: Node, graph: Graph) -> str:
    """The kind that the arguments are converted to: the widest kind among them and the result."""
    values = node.args[1:] if node.op == "where" else node.args
    kinds = {graph.types[value].kind for value in (node, *values)}
    if node.op in _ORDERED:
        kinds.add("int32")  # as a mask, true is one signed bit and would be less than false
    return next(kind for kind in ("float", "int64", "int32", "mask") if kind in kinds)


_RANDOM = frozenset(name for name, row in PRIMITIVES.items() if row.rule == "random")
"""Functions that make random floats from integers. Their arguments are not converted, and so keep all their bits."""

_ORDERED = frozenset(name for name, row in PRIMITIVES.items() if row.rule == "compare" and not row.commutative)
