"""What every node of a visitor tree says of itself, which is all that printing, drawing and reading a tree ask."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

Slots = tuple[tuple[str, float | None], ...]
"""Operands by name, each with the number that stands for it where none is given."""

Edges = tuple[tuple[int, ...], ...]


def show_slot(slot: tuple[str, float | None]) -> str:
    """`alpha`, or `alpha = 1` with its default."""
    name, default = slot
    return name if default is None else f"{name} = {default:g}"


class Part:
    """A node as data; `visitor.Visitor` is what people hold."""

    name: Any = None
    kind: ClassVar[str] = ""
    """What a node without a name is named after."""
    drawn: ClassVar[Literal["visitor", "matrix", "scalar", "operation", "store"]]
    edges: Edges = ()
    """Of each node below the positions of those whose values it takes, where they are joined so."""

    @property
    def inputs(self) -> tuple[int, int]:
        """The least and the most values an operator takes; a leaf or a whole tree takes none."""
        return 0, 0

    @property
    def slots(self) -> Slots:
        """The operands it reads."""
        return ()

    @property
    def is_named(self) -> bool:
        """False where it must be given a name when the tree is read."""
        return not self.kind or self.name is not None

    @property
    def label(self) -> str:
        """One line of text, without its children."""
        shown = ", ".join(map(show_slot, self.slots))
        return f"{type(self).__name__}({shown or self.name or ''})"

    @property
    def below(self) -> tuple[Part, ...]:
        """The nodes below, in the order in which they are printed, read, and given arguments."""
        return ()

    @property
    def operator(self) -> Part:
        """The node that stands in its line: of a tree visitor the operator."""
        return self

    @property
    def giver(self) -> Part:
        """The node inside that gives its value."""
        return self

    def role(self, position: int) -> tuple[str, str]:
        """What stands before and after a node below: its number, and whose values it takes."""
        return "", ""

    def __repr__(self) -> str:
        return self.label


def stores_its_result(tree: Part) -> bool:
    """Whether the operator that gives the tree's value stores it: then there is no further output D."""
    while tree.giver is not tree:
        tree = tree.giver
    return tree.drawn == "store"
