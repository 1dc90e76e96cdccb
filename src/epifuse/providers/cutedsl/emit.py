"""The emitter: walks the typed graph once while the kernel is traced. Knows no architecture, writes no source text."""

from collections.abc import Callable, Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from epifuse.ir import Graph, Node
from epifuse.providers.cutedsl.precision import Accuracy
from epifuse.providers.cutedsl.primitives import row

Fragment = Any
HELD = {"float": Float32, "int32": Int32, "mask": Boolean}


def walk(
    graph: Graph, leaf: Callable[[Node], Fragment], like: Fragment, accuracy: Mapping[Node, Accuracy] | None = None
) -> Mapping[Node, Fragment]:
    """Every node's fragment. `leaf` gives accum, loads and coordinates; `like` has the fragment's shape.

    `accuracy` says what a value must be computed with (`precision.accuracies`); in full where it says nothing.
    """
    values: dict[Node, Fragment] = {}
    for node in graph.nodes:
        if node.op == "const":
            values[node] = _constant(node, like, graph)
        elif not node.args:
            values[node] = leaf(node)
        else:
            values[node] = _computed(node, graph, values, (accuracy or {}).get(node, "full"))
    return values


def _computed(node: Node, graph: Graph, values: Mapping[Node, Fragment], accuracy: Accuracy) -> Fragment:
    args = [_as_kind(values[arg], graph, arg, node, i) for i, arg in enumerate(node.args)]
    if node.op == "cast":
        return _cast(node)(*args)
    name = str(node.attr) if node.op == "call" else node.op
    literals = tuple(arg.attr if arg.op == "const" else None for arg in node.args)
    return row(name, accuracy, graph.types[node].kind, literals)(*args)


def _constant(node: Node, like: Fragment, graph: Graph) -> Fragment:
    if isinstance(node.attr, bool):
        return cute.full_like(like, 1.0 if node.attr else 0.0) != 0.0
    return cute.full_like(like, node.attr, HELD[graph.types[node].kind])


def _as_kind(value: Fragment, graph: Graph, arg: Node, user: Node, position: int) -> Fragment:
    """Integers and masks beside floats become float32 first."""
    kind = graph.types[arg].kind
    mixed = graph.types[user].kind == "float" or any(graph.types[other].kind == "float" for other in user.args)
    if kind == "float" or not mixed or (user.op == "where" and position == 0):
        return value
    if kind == "mask":
        ones = cute.full(value.shape, 1.0, Float32)
        return cute.where(value, ones, cute.full_like(ones, 0.0))
    return value.to(Float32)


def _cast(node: Node) -> Callable[[Fragment], Fragment]:
    name = {"torch.float16": cutlass.Float16, "torch.bfloat16": cutlass.BFloat16, "torch.float32": Float32}[
        str(node.attr)
    ]
    return lambda x: x.to(name).to(Float32)
