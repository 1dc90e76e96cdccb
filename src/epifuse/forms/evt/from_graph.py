"""Convert any graph to a tree: with topological visitors between a branch and its merge, and tree visitors elsewhere.

A value that is used more than once is a branch. Its merge is its immediate dominator: the first node on every path from
the value to the results. A topological visitor holds all nodes between the two. Their other arguments are trees again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from epifuse.forms.evt.nodes import AccFetch, AuxLoad, ColBroadcast, Operand, RowBroadcast, ScalarBroadcast, SrcFetch
from epifuse.forms.evt.operators import AuxStore, ColReduction, Compute, Operation, RowReduction, ScalarReduction
from epifuse.forms.evt.tree import EVT, TopologicalVisitor
from epifuse.forms.evt.visitor import Visitor
from epifuse.frontend import parsed
from epifuse.frontend.context import Visit
from epifuse.frontend.statements import drive
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.vocabulary import VOCABULARY
from epifuse.ir import Graph, Node
from epifuse.ir.graph import expression, topological
from epifuse.passes.accesses import access_class


def to_tree(epilogue: Any) -> Visitor:
    """The tree of a graph, a function, or source text. Reading the tree gives a graph with the same digest.

    A graph should be one as written, `Parsed.graph`. In a typed graph, layout and host arithmetic are part of loads, so
    its tree is only for people to read. A captured number becomes an operand. A tree is returned as it is. Raises what
    parsing raises.
    """
    if isinstance(epilogue, Visitor):
        return epilogue
    if isinstance(epilogue, Graph):
        return drive(_Trees(_items(epilogue, {})).tree())  # type: ignore[no-any-return]  # a visit of a tree
    read = parsed(epilogue)
    return drive(_Trees(_items(read.graph, read.defaults)).tree())  # type: ignore[no-any-return]  # as above


# --- the graph as leaves and operators ---------------------------------------------------------------------------


@dataclass(eq=False)
class _Item:
    """A leaf or operator (`visitor`), the items whose values it takes (`args`), and the items that take its value
    (`users`). `visitor` is None for the item in which several results meet."""

    visitor: Visitor | None
    args: tuple[_Item, ...] = ()
    users: list[_Item] = field(default_factory=list)


def _items(graph: Graph, defaults: Mapping[str, float]) -> _Item:
    """The item in which all results meet: that of D, or an item without a visitor if there are several results."""
    made: dict[Node, _Item] = {}
    used = {arg for node in graph.nodes for arg in node.args}
    ends: list[_Item] = []
    for node in topological(graph.roots):
        args = tuple(_literal(arg) or made[arg] for arg in node.args) if node.op != "access" else ()
        names = [output.name for output in graph.outputs if output.node is node]
        if node not in used and len(names) == 1 and (reduction := _reduction(node, names[0], graph)) is not None:
            ends.append(_Item(reduction, args))
            continue
        made[node] = _Item(_visitor(node, graph, defaults), args)
        final = node not in used and (names[-1:] == ["D"] or not names)
        for name in names[: len(names) - 1] if final and names else names:
            made[node] = _Item(AuxStore(name), (made[node],))
        if node not in used:
            ends.append(made[node])
    ends.sort(key=lambda item: isinstance(item.visitor, (AuxStore, ScalarReduction, RowReduction, ColReduction)))
    return ends[0] if len(ends) == 1 else _Item(None, tuple(reversed(ends)))


def _literal(node: Node) -> _Item | None:
    """A new item for a constant, else None. Each use has an item of its own, so that a constant is never a branch."""
    return _Item(ScalarBroadcast(value=node.attr)) if node.op == "const" else None


def _visitor(node: Node, graph: Graph, defaults: Mapping[str, float]) -> Visitor:
    if node.op == "accum":
        return AccFetch()
    if node.op == "load":
        return _load(node, graph, defaults)
    if node.op == "access":  # a visitor tree's load, with the axes that it claims
        made: Visitor = _LOADS[node.attr[0]](str(node.args[0].attr.name))
        return made
    if node.op == "const":
        return ScalarBroadcast(value=node.attr)
    if node.op in PRIMITIVES or node.op == "call":
        return Compute(VOCABULARY[node.op if node.op in PRIMITIVES else str(node.attr)].function)
    return Operation(node.op, node.attr, len(node.args))


_LOADS: dict[str, Any] = {
    "scalar": ScalarBroadcast,
    "row": RowBroadcast,
    "column": ColBroadcast,
    "tile": AuxLoad,
    "any": Operand,
}


def _load(node: Node, graph: Graph, defaults: Mapping[str, float]) -> Visitor:
    """The leaf for a load. Its class follows from the node's type; without types it is an `Operand`."""
    name = str(node.attr.name)
    name = expression(graph.hosts[name]) if name in graph.hosts else name
    access = access_class(graph.types[node]).removeprefix("batch ") if node in graph.types else "any"
    if name == "C" and access == "tile":
        return SrcFetch()
    made: Visitor = _LOADS[access](name.removeprefix("@"), defaults.get(name))
    return made


_REDUCTIONS: dict[tuple[str, ...], Any] = {("m", "n"): ScalarReduction, ("m",): RowReduction, ("n",): ColReduction}
_EACH_BATCH = {ScalarReduction: (0, 0, 1), RowReduction: (0, 1, 1), ColReduction: (1, 0, 1)}


def _reduction(node: Node, name: str, graph: Graph) -> Visitor | None:
    """The node of a tree for output `name`, if it reduces a full-size value over whole axes; else None."""
    axes = _axes_reduced(node, graph)
    kind = _REDUCTIONS.get(tuple(axis for axis in axes if axis != "l")) if axes else None
    if axes is None or kind is None:
        return None
    made: Visitor = kind(name, VOCABULARY[node.attr[0]].function, stride=None if "l" in axes else _EACH_BATCH[kind])
    return made


def _axes_reduced(node: Node, graph: Graph) -> tuple[str, ...] | None:
    """The axes over which a node reduces a full-size value, or None if it does not, or if an axis is not whole."""
    if node.op == "reduce":
        held = graph.types[node.args[0]].factors
        whole = {"m", "n"} <= {f.axis for f in held} and all(f.extent is None and f.stride == 1 for f in held)
        batched = any(f.axis == "l" for f in held)
        return tuple(f.axis for f in node.attr[1]) + (() if batched else ("l",)) if whole else None
    if node.op == "reduce_dims":
        return ("l", "m", "n") if node.attr[1] is None and _above_accum(node) else None
    return node.attr[1] if node.op == "reduce_axes" else None


def _above_accum(node: Node) -> bool:
    """Whether a node's argument varies as accum does, as far as this is known without types: it is arithmetic on
    accum."""
    for below in reversed(topological(node.args)):
        if below.op == "accum":
            return True
        if below.op in ("reduce_dims", "reduce_axes", "permute", "reshape", "unsqueeze", "coordinate"):
            return False
    return False


# --- dominators --------------------------------------------------------------------------------------------------


class _Trees:
    """Builds the trees of what each item dominates.

    - `order`: all items, arguments first.
    - `above`, `depth`: the immediate dominator of each item, and the item's depth in the tree of dominators.
    - `branches`: for each item, the branches that merge in it.
    """

    def __init__(self, root: _Item) -> None:
        self.root = root
        self.order = list(topological((root,)))
        for item in self.order:
            for arg in item.args:
                arg.users.append(item)
        self.above: dict[_Item, _Item] = {}
        self.depth: dict[_Item, int] = {root: 0}
        self.branches: dict[_Item, list[_Item]] = {item: [] for item in self.order}
        for item in reversed(self.order[:-1]):
            merge = item.users[0]
            for user in item.users[1:]:
                merge = self.meeting(merge, user)
            self.above[item], self.depth[item] = merge, self.depth[merge] + 1
            if len(item.users) > 1:
                self.branches[merge].append(item)

    def meeting(self, one: _Item, other: _Item) -> _Item:
        """The first item on all paths from `one` and from `other` to the root."""
        while one is not other:
            if self.depth[one] >= self.depth[other]:
                one = self.above[one]
            else:
                other = self.above[other]
        return one

    def tree(self) -> Visit:
        """The tree of the whole graph."""
        return (yield self.whole(self.root))

    def whole(self, item: _Item) -> Visit:
        """The tree of an item that depends only on items that it dominates."""
        if self.branches[item] or item.visitor is None:
            return (yield self.between(item))
        if not item.args:
            return item.visitor
        children = []
        for arg in item.args:
            children.append((yield self.whole(arg)))
        return EVT(item.visitor, *children)

    def between(self, merge: _Item) -> Visit:
        """The topological visitor that holds the branches of `merge` and all items between."""
        inside = self.region(merge)
        nodes: list[Visitor] = []
        edges: list[tuple[int, ...]] = []
        places: dict[_Item, int] = {}
        for item in (item for item in self.order if item in inside):
            if not any(arg in inside for arg in item.args) and item is not merge:
                nodes.append((yield self.whole(item)))
                edges.append(())
            else:
                for arg in item.args:
                    if arg not in inside:
                        places[arg] = len(nodes)
                        nodes.append((yield self.whole(arg)))
                        edges.append(())
                if item.visitor is None:
                    break
                nodes.append(item.visitor)
                edges.append(tuple(places[arg] for arg in item.args))
            places[item] = len(nodes) - 1
        return _with_last(nodes, edges, places[merge.args[-1]] if merge.visitor is None else len(nodes) - 1)

    def region(self, merge: _Item) -> set[_Item]:
        """The items that one visitor holds: `merge`, the branches that merge there, and all items between. If an item
        between them takes a value from inside, its own branches and the items between are included too."""
        inside = {merge}
        pending = [merge]
        while pending:
            for branch in self.branches[pending.pop()]:
                stack = [branch]
                while stack:
                    item = stack.pop()
                    if item not in inside:
                        inside.add(item)
                        stack.extend(item.users)
                        if any(arg in inside for arg in item.args):
                            pending.append(item)
            # An item may have come in before items below it. Then its own branches have to come in now.
            pending += [i for i in inside if self.branches[i] and self._opened(i, inside)]
        return inside

    def _opened(self, item: _Item, inside: set[_Item]) -> bool:
        return any(arg in inside for arg in item.args) and not all(b in inside for b in self.branches[item])


def _with_last(nodes: list[Visitor], edges: list[tuple[int, ...]], last: int) -> TopologicalVisitor:
    """A topological visitor with node `last`, which gives the visitor's value, moved to the end. No node takes its
    value."""
    order = [position for position in range(len(nodes)) if position != last] + [last]
    place = {old: new for new, old in enumerate(order)}
    moved = [tuple(place[source] for source in edges[old]) for old in order]
    return TopologicalVisitor(moved, *(nodes[old] for old in order))
