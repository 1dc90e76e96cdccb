"""One element of a row, as a target's logit, of what is computed of the whole row, as `log_softmax`.

The gather of x - m, where m is one value a row, is the gather of x, less m: the same operations on the chosen element
alone. No value of a tile then waits for its row, so that rows of any length take one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from epifuse.fusion.primitives import PRIMITIVES
from epifuse.ir import Kind, Node
from epifuse.ir.graph import topological
from epifuse.ir.types import Dim, canonical
from epifuse.passes.alignment import Alignment

_ELEMENTWISE = {*PRIMITIVES, "call", "cast"}


def waiting(root: Node, along: Dim, to: Alignment) -> tuple[Node, ...]:
    """What varies along this dim at `root` and below, and is computed of something that is reduced along it.

    Nothing where a value below varies over another part of the same axis: types are of whole axes until they are
    refined, and tiles hold the segments that rows are cut into.
    """
    axes, found = {factor.axis for factor in along}, dict[Node, bool]()
    for node in topological((root,)):
        if any(factor.axis in axes and factor not in along for factor in to.types[node].factors):
            return ()
        own = node.op == "reduce" and not set(along).isdisjoint(node.attr[1])
        found[node] = own or any(found[arg] for arg in node.args)
    return tuple(node for node, waits in found.items() if waits and _varies(node, along, to))


def chosen(waits: Sequence[Node], here: Node, along: Dim, to: Alignment) -> Node:
    """The element of the last value of `waiting` at the one place along the dim where the mask `here` is true. Where it
    is true nowhere, the element means nothing."""
    made: dict[Node, Node] = {}

    def of(node: Node) -> Node:
        if node not in made:
            made[node] = _picked(node, here, along, to) if _varies(node, along, to) else node
        return made[node]

    for node in waits:
        if node.op in _ELEMENTWISE:
            made[node] = _emitted(to, node.op, *map(of, node.args), attr=node.attr, kind=to.types[node].kind)
    return of(waits[-1])


def _varies(node: Node, along: Dim, to: Alignment) -> bool:
    return not set(along).isdisjoint(to.types[node].factors)


def _picked(node: Node, here: Node, along: Dim, to: Alignment) -> Node:
    """Of what waits for nothing: the sum of all where the others are zero, which is exact; of masks whether any is."""
    kind = to.types[node].kind
    if kind == "mask":
        both = _emitted(to, "logical_and", here, node, kind=kind)
        return _emitted(to, "reduce", both, attr=("any", along), kind=kind)
    nothing = to.emit("const", attr=0.0 if kind == "float" else 0, kind="float" if kind == "float" else "int32")
    alone = _emitted(to, "where", here, node, nothing, kind=kind)
    if kind == "float":
        return _emitted(to, "reduce", alone, attr=("sum", along), kind=kind)
    found = _emitted(to, "reduce", alone, attr=("sum", along), kind="int64")
    return found if kind == "int64" else _emitted(to, "cast", found, attr=torch.int32, kind=kind)


def _emitted(to: Alignment, op: str, *args: Node, attr: Any = None, kind: Kind) -> Node:
    """A node that varies over all that its arguments do, but what is reduced."""
    gone = attr[1] if op == "reduce" else ()
    factors = canonical(factor for arg in args for factor in to.types[arg].factors if factor not in gone)
    return to.emit(op, *args, attr=attr, kind=kind, dims=(factors,))
