"""What every node of a visitor tree is: a value that can be printed, drawn, handed its arguments, and run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from epifuse.arguments import GemmArguments
    from epifuse.frontend import Parsed

Slots = tuple[tuple[str, float | None], ...]
"""Operands by name, each with the number that stands for it where none is given."""


def show_slot(slot: tuple[str, float | None]) -> str:
    """`alpha`, or `alpha = 1` with its default."""
    name, default = slot
    return name if default is None else f"{name} = {default:g}"


class Visitor:
    """The base of all nodes. Any node that needs no inputs is a tree, and a tree is an epilogue."""

    name: Any = None
    kind: ClassVar[str] = ""

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

    def __str__(self) -> str:
        from epifuse.evt.drawing import text

        return text(self)

    def __repr__(self) -> str:
        return self.label

    def __getstate__(self) -> dict[str, Any]:
        # What it was read to holds functions, and is read again.
        return {name: value for name, value in self.__dict__.items() if name != "_parsed"}

    def to_dot(self) -> str:
        """The tree in Graphviz's DOT language, in the colours of the article's figures."""
        from epifuse.evt.drawing import to_dot

        return to_dot(self)

    def to_svg(self, path: str | os.PathLike[str]) -> Path:
        """Write the tree as a picture. Raises `UnsupportedError` without the package pygraphviz."""
        from epifuse.evt.drawing import to_svg

        return to_svg(self, path)

    def arguments(self, nested: Any = (), /, **flat: Any) -> dict[str, Any]:
        """Operands and outputs by name, from a nested argument tree or from flat names with pointers and strides.

        `nested` is as CUTLASS nests it, tuples for braces: a tree visitor takes `(first child, ..., last child, node
        op)`, a topological visitor one entry a node, `ScalarBroadcast` `((value, ...), (pointer, ...), (stride, ...))`,
        the other loads `(pointer, value if null, (dM, dN, dL))`, a store `(pointer, stride)`, a reduction `(pointer,
        identity, stride)`, `Compute` its operands in order; `()` where there is nothing to say. Raises `ArgumentError`
        naming the node that a part does not fit.
        """
        from epifuse.evt.arguments import from_nested

        return {**(from_nested(self, nested) if nested != () else {}), **self.__epifuse__().named(flat)}

    def get_workspace_size(self, args: GemmArguments) -> int:
        """Bytes of workspace the best kernel needs for `args`. Raises `UnsupportedError` where there is none."""
        from epifuse.evt.arguments import workspace_size

        return workspace_size(args)

    def __epifuse__(self) -> Parsed:
        """The epilogue this tree is. Raises what the functions in it raise when parsed."""
        from epifuse.evt.reading import parsed

        known: Parsed | None = self.__dict__.get("_parsed")
        if known is None or not known.is_current():
            self.__dict__["_parsed"] = known = parsed(self)
        return known
