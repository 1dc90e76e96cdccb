"""One node class: pure structure, interned per graph. Edges are `args`, never names; places live in the graph."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from epifuse.base.errors import Loc
from epifuse.ir.types import Type


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """`op` applied to `args`. Two nodes are equal only if they are the same object: make them through `Builder`.

    `attr` is what the op knows at compile time. It is hashable: None, a number, a string, a dtype, a `Load`, or a tuple
    of these. `fusion.operations` says which `attr` each op has.
    """

    op: str
    args: tuple[Node, ...] = ()
    attr: Any = None

    def __repr__(self) -> str:
        # Short on purpose: printing the arguments would be exponential on a shared DAG.
        return f"<{self.op} {self.attr!r}/{len(self.args)}>"


def _identity(attr: Hashable) -> Hashable:
    """A key that is equal only for equal constants, unlike `attr` itself: 0.0 == -0.0, 1 == True, and nan != nan."""
    if isinstance(attr, tuple):
        return tuple(_identity(item) for item in attr)
    return (type(attr), repr(attr)) if isinstance(attr, (bool, int, float)) else attr


@dataclass
class Builder:
    """Makes nodes, one for each structure, and records the first source places that wrote a node, and its type."""

    locs: dict[Node, tuple[Loc, ...]] = field(default_factory=dict)
    types: dict[Node, Type] = field(default_factory=dict)
    _interned: dict[Hashable, Node] = field(default_factory=dict)

    def node(self, op: str, *args: Node, attr: Hashable = None, locs: tuple[Loc, ...] = ()) -> Node:
        """The node for this structure; `locs` are added to the places it already has."""
        key = (op, args, _identity(attr))
        node = self._interned.get(key)
        if node is None:
            node = self._interned[key] = Node(op, args, attr)
        known = self.locs.get(node, ())
        self.locs[node] = merged(known, locs)
        return node


_PLACES = 4


def merged(known: tuple[Loc, ...], further: tuple[Loc, ...]) -> tuple[Loc, ...]:
    """The first `_PLACES` of both. A constant that ten thousand lines write needs no list of ten thousand places."""
    if len(known) >= _PLACES or not further:
        return known
    # `is`, not `==`: a place inside a helper holds the chain of calls that led there, and that may be long.
    return (known + tuple(loc for loc in further if not any(loc is place for place in known)))[:_PLACES]
