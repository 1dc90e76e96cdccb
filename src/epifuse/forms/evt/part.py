"""What every node of a visitor tree says of itself. Printing, drawing and reading a tree use nothing else."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

Slots = tuple[tuple[str, float | None], ...]
"""Operands by name, each with the number that replaces it if it is not given, or None."""

Edges = tuple[tuple[int, ...], ...]


def show_slot(slot: tuple[str, float | None]) -> str:
    """An operand as text: `alpha`, or `alpha = 1` if it has a default."""
    name, default = slot
    return name if default is None else f"{name} = {default:g}"


class Part:
    """A node as data. `visitor.Visitor` extends it to the class that users see."""

    name: Any = None
    kind: ClassVar[str] = ""
    """The name that a node without one gets, followed by a number if it is taken."""
    drawn: ClassVar[Literal["visitor", "matrix", "scalar", "operation", "store"]]
    edges: Edges = ()
    """For each node in `below`, the positions of the nodes whose values it takes. Only topological visitors have it."""

    @property
    def inputs(self) -> tuple[int, int]:
        """The least and the largest number of values an operator takes. A leaf or a whole tree takes none."""
        return 0, 0

    @property
    def slots(self) -> Slots:
        """The operands it reads."""
        return ()

    @property
    def is_named(self) -> bool:
        """Whether the node has a name or needs none. Otherwise it gets one when the tree is read."""
        return not self.kind or self.name is not None

    @property
    def label(self) -> str:
        """The node as one line of text, without its children."""
        shown = ", ".join(map(show_slot, self.slots))
        return f"{type(self).__name__}({shown or self.name or ''})"

    @property
    def below(self) -> tuple[Part, ...]:
        """The nodes below, in the order in which they are printed, read, and given arguments."""
        return ()

    @property
    def operator(self) -> Part:
        """The node that is shown in its line: the operator of a tree visitor, else the node itself."""
        return self

    @property
    def giver(self) -> Part:
        """The node whose value is the node's own: an operator, the last node, or the output tree."""
        return self

    def role(self, position: int) -> tuple[str, str]:
        """The texts before and after the line of node `position` in `below`: its number or role, and the numbers of the
        nodes whose values it takes."""
        return "", ""

    def __repr__(self) -> str:
        return self.label


def stores_its_result(tree: Part) -> bool:
    """Whether the operator that gives the tree's value also stores it. Then there is no further output D."""
    while tree.giver is not tree:
        tree = tree.giver
    return tree.drawn == "store"
