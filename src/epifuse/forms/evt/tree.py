"""Nodes that join others: tree visitors, topological visitors, split tree visitors. They check what they are given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from epifuse.base.errors import fail, kind_of
from epifuse.forms.evt.operators import OPERATORS
from epifuse.forms.evt.outline import Line
from epifuse.forms.evt.part import Edges
from epifuse.forms.evt.reading import Reading
from epifuse.forms.evt.visitor import Visitor
from epifuse.frontend.context import Visit
from epifuse.ir import Node


@dataclass(frozen=True, repr=False, init=False)
class EVT(Visitor):
    """A tree visitor: the operator `node_op` applied to the values of its children.

    Raises `ArgumentTypeError` for what is no node, `ArgumentError` if the operator takes another number of children.
    """

    node_op: Visitor
    children: tuple[Visitor, ...]
    drawn = "visitor"

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

    @property
    def below(self) -> tuple[Visitor, ...]:
        return self.children

    @property
    def operator(self) -> Visitor:
        return self.node_op

    giver = operator

    def visit(self, reader: Reading, line: Line, acc: Node) -> Visit:
        """The operator's value, given the values of its children."""
        values = []
        for child in self.children:
            values.append((yield reader.visit(child, acc)))
        return line.node.read(reader, line, values, acc)


@dataclass(frozen=True, repr=False, init=False)
class TopologicalVisitor(Visitor):
    """Nodes that are visited one after the other. `edges[i]` are the positions of the nodes whose values node i takes.

    Its value is that of the last node. A node is an operator, or a whole tree, whose edges are `()`. Raises
    `ArgumentError` for cycles, edges to nodes visited later, and operators with another number of inputs.
    """

    edges: Edges
    nodes: tuple[Visitor, ...]
    drawn = "visitor"

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

    @property
    def below(self) -> tuple[Visitor, ...]:
        return self.nodes

    @property
    def giver(self) -> Visitor:
        return self.nodes[-1]

    def role(self, position: int) -> tuple[str, str]:
        sources = ", ".join(map(str, self.edges[position]))
        return f"{position}: ", f" <- {sources}" if sources else ""

    def visit(self, reader: Reading, line: Line, acc: Node) -> Visit:
        """The last node's value. Each node takes the values of the nodes that its edges name."""
        found: list[Node] = []
        for sources, child in zip(self.edges, self.nodes, strict=True):
            if sources:
                own = next(reader.lines)
                found.append(own.node.read(reader, own, [found[source] for source in sources], acc))
            else:
                found.append((yield reader.visit(child, acc)))
        return found[-1]


@dataclass(frozen=True, repr=False, init=False)
class SplitTreeVisitor(Visitor):
    """A tree whose other trees share the value of `input_tree`: in them, AccFetch means that value.

    The value of `output_tree` is the result. The further trees are visited only for the outputs that they store.
    """

    input_tree: Visitor
    output_tree: Visitor
    aux_out_trees: tuple[Visitor, ...]
    drawn = "visitor"

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

    @property
    def below(self) -> tuple[Visitor, ...]:
        return (self.input_tree, self.output_tree, *self.aux_out_trees)

    @property
    def giver(self) -> Visitor:
        return self.output_tree

    def role(self, position: int) -> tuple[str, str]:
        return ("input: ", "output: ", "aux: ")[min(position, 2)], ""

    def visit(self, reader: Reading, line: Line, acc: Node) -> Visit:
        """The value of the output tree. Its accumulator is the value of the input tree."""
        value = yield reader.visit(self.input_tree, acc)
        result = yield reader.visit(self.output_tree, value)
        for other in self.aux_out_trees:
            yield reader.visit(other, value)
        return result


# --- checks ------------------------------------------------------------------------------------------------------


def _check_nodes(visitor: str, nodes: Iterable[Any]) -> None:
    for node in nodes:
        if not isinstance(node, Visitor):
            what = f"the class {node.__name__}" if isinstance(node, type) else kind_of(node)
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
    """The nodes of the first cycle, with its first node repeated at the end. Empty if there is no cycle."""
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
