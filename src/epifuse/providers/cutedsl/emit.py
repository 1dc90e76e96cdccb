"""The emitter: walks the typed graph once while the kernel is traced. Knows no architecture, writes no source text."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from epifuse.ir import Graph, Node
from epifuse.providers.cutedsl.precision import Accuracy
from epifuse.providers.cutedsl.primitives import row

Fragment = Any
HELD = {"float": Float32, "int64": Int64, "int32": Int32, "mask": Boolean}


def walk(
    graph: Graph,
    leaf: Callable[[Node], Fragment],
    like: Fragment,
    accuracy: Mapping[Node, Accuracy] | None = None,
    nodes: Iterable[Node] | None = None,
) -> Mapping[Node, Fragment]:
    """The fragments of `nodes`, or of all. `leaf` gives accum, loads, coordinates and reductions.

    `like` has the fragment's shape. `accuracy` says what a value must be computed with (`precision.accuracies`); in
    full where it says nothing.
    """
    values: dict[Node, Fragment] = {}
    for node in graph.nodes if nodes is None else nodes:
        if node.op == "const":
            values[node] = _constant(node, like, graph)
        elif not node.args or node.op == "reduce":
            values[node] = leaf(node)
        else:
            values[node] = _computed(node, graph, values, (accuracy or {}).get(node, "full"))
    return values


def _computed(node: Node, graph: Graph, values: Mapping[Node, Fragment], accuracy: Accuracy) -> Fragment:
    kind = _common_kind(node, graph)
    args = [
        values[arg] if node.op == "where" and i == 0 else as_kind(values[arg], graph.types[arg].kind, kind)
        for i, arg in enumerate(node.args)
    ]
    if node.op == "cast":
        return _cast(args[0], node.attr)
    if node.op == "expand":
        return args[0]
    name = str(node.attr) if node.op == "call" else node.op
    literals = tuple(arg.attr if arg.op == "const" else None for arg in node.args)
    return row(name, accuracy, graph.types[node].kind, literals)(*args)


def _constant(node: Node, like: Fragment, graph: Graph) -> Fragment:
    if isinstance(node.attr, bool):
        return cute.full_like(like, 1.0 if node.attr else 0.0) != 0.0
    return cute.full_like(like, node.attr, HELD[graph.types[node].kind])


def _common_kind(node: Node, graph: Graph) -> str:
    """What the arguments are converted to: the widest kind among them and the result."""
    values = node.args[1:] if node.op == "where" else node.args
    kinds = {graph.types[value].kind for value in (node, *values)}
    if node.op in _ORDERED:
        kinds.add("int32")  # true, held as one signed bit, would be less than false
    return next(kind for kind in ("float", "int64", "int32", "mask") if kind in kinds)


_ORDERED = frozenset({"lt", "le", "gt", "ge"})


def as_kind(value: Fragment, kind: str, wanted: str) -> Fragment:
    """A fragment of one kind as another: a mask becomes 0 and 1."""
    if kind == wanted or kind == "float" or wanted == "mask":
        return value
    if kind == "mask":
        one = cute.full(value.shape, 1, HELD[wanted])
        return cute.where(value, one, cute.full_like(one, 0))
    return value.to(HELD[wanted])


_DTYPES: Mapping[str, Any] = {
    "torch.float16": cutlass.Float16,
    "torch.bfloat16": cutlass.BFloat16,
    "torch.float32": Float32,
    "torch.int64": Int64,
    "torch.int32": Int32,
    "torch.int16": cutlass.Int16,
    "torch.int8": cutlass.Int8,
    "torch.uint8": cutlass.Uint8,
}


def _cast(value: Fragment, dtype: object) -> Fragment:
    """torch's conversion: floats to nearest even, integers towards zero, then wrapping."""
    to = _DTYPES[str(dtype)]
    if to.is_float:
        return value.to(to).to(Float32)
    return value.to(Int64) if to is Int64 else value.to(Int32).to(to).to(Int32)
