"""How nodes are joined: a tree visitor, a topological visitor, a split tree visitor. Checked when they are made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from epifuse.errors import fail
from epifuse.evt.nodes import OPERATORS, STORES
from epifuse.evt.visitor import Visitor

Edges = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, repr=False, init=False)
class EVT(Visitor):
    """A tree visitor: the operator `node_op` on the values of its children.

    Raises `ArgumentTypeError` for what is no node, `ArgumentError` where the operator takes another number of children.
    """

    node_op: Visitor
    children: tuple[Visitor, ...]

    def __init__(self, node_op: Visitor, *children: Visitor) -> None:
        _check_nodes("EVT", (node_op, *children))
        if not isinstance(node_op, OPERATORS):
            raise fail("tree_operator", None, node=node_op.label)
        _check_arity(node_op, len(children))
        _check_whole(children)
        object.__setattr__(self, "node_op", node_op)
        object.__setattr__(self, "children", tuple(children))

    @property
    def label(self) -> str:
        return self.node_op.label


@dataclass(frozen=True, repr=False, init=False)
class TopologicalVisitor(Visitor):
    """Nodes visited one after the other; `edges[i]` are the positions of those whose values node i takes.

    Its value is the last node's. A node is an operator, or a whole tree, which takes nothing: `()`. Raises
    `ArgumentError` for cycles, edges to nodes visited later, and operators with another number of inputs.
    """

    edges: Edges
    nodes: tuple[Visitor, ...]

    def __init__(self, edges: Sequence[Sequence[int]], *nodes: Visitor) -> None:
        _check_nodes("TopologicalVisitor", nodes)
        if not isinstance(edges, Sequence) or not all(isinstance(sources, Sequence) for sources in edges):
            want = "a tuple of tuples, each of the nodes whose values a node takes"
            raise fail("tree_field", None, node="TopologicalVisitor", field="edges", want=want, value=repr(edges))
        if not nodes or len(edges) != len(nodes):
            raise fail("tree_edges", None, have=len(edges), want=len(nodes))
        written = tuple(tuple(sources) for sources in edges)
        _check_order(written, nodes)
        for sources, node in zip(written, nodes, strict=True):
            _check_arity(node, len(sources))
        object.__setattr__(self, "edges", written)
        object.__setattr__(self, "nodes", nodes)

    @property
    def label(self) -> str:
        return "TopologicalVisitor"


@dataclass(frozen=True, repr=False, init=False)
class SplitTreeVisitor(Visitor):
    """The value of `input_tree` is what AccFetch means in the others; the value of `output_tree` is the result.

    The further trees are visited for what they store.
    """

    input_tree: Visitor
    output_tree: Visitor
    aux_out_trees: tuple[Visitor, ...]

    def __init__(self, input_tree: Visitor, output_tree: Visitor, *aux_out_trees: Visitor) -> None:
        nodes = (input_tree, output_tree, *aux_out_trees)
        _check_nodes("SplitTreeVisitor", nodes)
        _check_whole(nodes)
        object.__setattr__(self, "input_tree", input_tree)
        object.__setattr__(self, "output_tree", output_tree)
        object.__setattr__(self, "aux_out_trees", tuple(aux_out_trees))

    @property
    def label(self) -> str:
        return "SplitTreeVisitor"


def children_of(node: Visitor) -> tuple[Visitor, ...]:
    """The nodes below, in the order in which they are printed, read, and given arguments."""
    match node:
        case EVT():
            return node.children
        case TopologicalVisitor():
            return node.nodes
        case SplitTreeVisitor():
            return (node.input_tree, node.output_tree, *node.aux_out_trees)
    return ()


def stores_its_result(tree: Visitor) -> bool:
    """Whether the operator that gives the tree's value stores it: then there is no further output D."""
    while True:
        match tree:
            case EVT():
                return isinstance(tree.node_op, STORES)
            case TopologicalVisitor():
                tree = tree.nodes[-1]
            case SplitTreeVisitor():
                tree = tree.output_tree
            case _:
                return isinstance(tree, STORES)


# --- checks ------------------------------------------------------------------------------------------------------


def _check_nodes(visitor: str, nodes: Iterable[Any]) -> None:
    for node in nodes:
        if not isinstance(node, Visitor):
            what = f"the class {node.__name__}" if isinstance(node, type) else f"a {type(node).__name__}"
            raise fail("tree_node", None, visitor=visitor, what=what)


def _check_arity(node: Visitor, have: int) -> None:
    least, most = node.inputs
    if not least <= have <= most:
        want = str(least) if least == most else f"{least} to {most}"
        raise fail("tree_arity", None, node=node.label, want=want, have=have)


def _check_whole(nodes: Iterable[Visitor]) -> None:
    for node in nodes:
        _check_arity(node, 0)


def _check_order(edges: Edges, nodes: tuple[Visitor, ...]) -> None:
    late = None
    for position, sources in enumerate(edges):
        for source in sources:
            if type(source) is not int or not 0 <= source < len(nodes):
                last = len(nodes) - 1
                raise fail("tree_edge", None, position=position, node=nodes[position].label, source=source, last=last)
            if source >= position and late is None:
                late = (position, source)
    if late is None:
        return
    if cycle := _cycle(edges):
        raise fail("tree_cycle", None, cycle=" -> ".join(f"{n} {nodes[n].label}" for n in cycle))
    position, source = late
    labels = {"node": nodes[position].label, "other": nodes[source].label}
    raise fail("tree_order", None, position=position, source=source, **labels)


def _cycle(edges: Edges) -> tuple[int, ...]:
    """The first cycle of the edges, its first node again at its end; empty if there is none."""
    done: set[int] = set()
    for start in range(len(edges)):
        path: list[int] = [start]
        rest = [list(edges[start])]
        while path:
            if not rest[-1]:
                done.add(path.pop())
                rest.pop()
                continue
            source = rest[-1].pop(0)
            if source in path:
                return (*path[path.index(source) :], source)
            if source not in done:
                path.append(source)
                rest.append(list(edges[source]))
    return ()
