"""The class of nodes that users see: a node can be printed, drawn, given arguments, and run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from epifuse.forms.evt import arguments, drawing, reading
from epifuse.forms.evt.outline import Line
from epifuse.forms.evt.part import Part
from epifuse.frontend import Parsed, parsed_once
from epifuse.ir import Node
from epifuse.runtime.arguments import GemmArguments


class Visitor(Part):
    """The base class of all nodes. A node that needs no inputs is a tree, and a tree can be passed as an epilogue."""

    def __str__(self) -> str:
        return drawing.text(self)

    def to_dot(self) -> str:
        """The tree in Graphviz's DOT language, in the colours of Colfax's article on epilogue visitor trees."""
        return drawing.to_dot(self)

    def to_svg(self, path: str | os.PathLike[str]) -> Path:
        """Write the tree as a picture. Raises `UnsupportedError` without the package pygraphviz."""
        return drawing.to_svg(self, path)

    def arguments(self, nested: Any = (), /, **flat: Any) -> dict[str, Any]:
        """Operands and outputs by name, from a nested argument tree or from flat names with pointers and strides.

        `nested` is nested as in CUTLASS, with tuples for braces. A tree visitor takes `(first child, ..., last child,
        node op)`, a topological visitor one entry for each node, `ScalarBroadcast` `((value, ...), (pointer, ...),
        (stride, ...))`, the other loads `(pointer, value if null, (dM, dN, dL))`, a store `(pointer, stride)`, a
        reduction `(pointer, identity, stride)`, and `Compute` its operands in order. `()` stands for no arguments.
        Raises `ArgumentError` that names the node whose part does not fit.
        """
        return {**(arguments.from_nested(self, nested) if nested != () else {}), **self.__epifuse__().named(flat)}

    def get_workspace_size(self, args: GemmArguments) -> int:
        """The bytes of workspace that the best kernel for `args` needs. Raises `UnsupportedError` if none fits."""
        return arguments.workspace_size(args)

    def __epifuse__(self) -> Parsed:
        """This tree as a parsed epilogue. Raises what its functions raise when they are parsed."""
        return parsed_once(self, lambda: reading.parsed(self))

    def read(self, reader: reading.Reading, line: Line, values: list[Node], acc: Node) -> Node:
        """The value of a leaf or operator, given the `values` that it takes. Stores are added to `reader`. `acc` is the
        value of AccFetch."""
        ((name, default),) = self.slots
        return reader.operand(name, default, line)

    def handed(self, line: Line, fields: tuple[Any, ...], part: Any) -> Iterable[tuple[str, Any]]:
        """Yield operands and outputs by name, from the node's own part of nested arguments. `fields` are the part's
        fields; `part` itself is for messages."""
        if fields:
            raise arguments.misfit(line, "(): nothing", part)
        return ()
