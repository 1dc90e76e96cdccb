"""The gather of one element per row, such as a target's logit, from a value that needs the whole row: `log_softmax`.

gather(x - m), where m is one value per row, equals gather(x) - m: the same operations on the chosen element alone. No
value of a tile then waits for its row, so that rows of any length take one launch.
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
    """`root` and the nodes below it that vary along this dim and depend on a reduction along it, arguments first.

    Empty if a value below varies over another factor of the same axis: types are not in the finest factors before
    `refine` runs, and a tile holds whole segments, into which a reshape cuts rows.
    """
    axes, found = {factor.axis for factor in along}, dict[Node, bool]()
    for node in topological((root,)):
        if any(factor.axis in axes and factor not in along for factor in to.types[node].factors):
            return ()
        own = node.op == "reduce" and not set(along).isdisjoint(node.attr[1])
        found[node] = own or any(found[arg] for arg in node.args)
    return tuple(node for node, waits in found.items() if waits and _varies(node, along, to))


def chosen(waits: Sequence[Node], here: Node, along: Dim, to: Alignment) -> Node:
    """The element of the last node of `waits` (from `waiting`) at the place along the dim where the mask `here` is
    true. If the mask is true nowhere, the element has no meaning."""
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
    """The element where `here` is true, of a node without a reduction along the dim: the sum along the dim with all
    other elements set to zero, which is exact. For a mask: whether any element is true there."""
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
    """A node that varies over the factors of its arguments, without those that it reduces."""
    gone = attr[1] if op == "reduce" else ()
    factors = canonical(factor for arg in args for factor in to.types[arg].factors if factor not in gone)
    return to.emit(op, *args, attr=attr, kind=kind, dims=(factors,))
