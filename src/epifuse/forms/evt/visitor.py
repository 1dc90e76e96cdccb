"""What people hold: a node that can be printed, drawn, handed its arguments, and run."""

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
    """The base of all nodes. Any node that needs no inputs is a tree, and a tree is an epilogue."""

    def __str__(self) -> str:
        return drawing.text(self)

    def to_dot(self) -> str:
        """The tree in Graphviz's DOT language, in the colours of the article's figures."""
        return drawing.to_dot(self)

    def to_svg(self, path: str | os.PathLike[str]) -> Path:
        """Write the tree as a picture. Raises `UnsupportedError` without the package pygraphviz."""
        return drawing.to_svg(self, path)

    def arguments(self, nested: Any = (), /, **flat: Any) -> dict[str, Any]:
        """Operands and outputs by name, from a nested argument tree or from flat names with pointers and strides.

        `nested` is as CUTLASS nests it, tuples for braces: a tree visitor takes `(first child, ..., last child, node
        op)`, a topological visitor one entry a node, `ScalarBroadcast` `((value, ...), (pointer, ...), (stride, ...))`,
        the other loads `(pointer, value if null, (dM, dN, dL))`, a store `(pointer, stride)`, a reduction `(pointer,
        identity, stride)`, `Compute` its operands in order; `()` where there is nothing to say. Raises `ArgumentError`
        naming the node that a part does not fit.
        """
        return {**(arguments.from_nested(self, nested) if nested != () else {}), **self.__epifuse__().named(flat)}

    def get_workspace_size(self, args: GemmArguments) -> int:
        """Bytes of workspace the best kernel needs for `args`. Raises `UnsupportedError` where there is none."""
        return arguments.workspace_size(args)

    def __epifuse__(self) -> Parsed:
        """The epilogue this tree is. Raises what the functions in it raise when parsed."""
        return parsed_once(self, lambda: reading.parsed(self))

    def read(self, reader: reading.Reading, line: Line, values: list[Node], acc: Node) -> Node:
        """What a leaf or operator gives, and stores, when it is handed `values`; AccFetch means `acc`."""
        ((name, default),) = self.slots
        return reader.operand(name, default, line)

    def handed(self, line: Line, fields: tuple[Any, ...], part: Any) -> Iterable[tuple[str, Any]]:
        """Operands and outputs by name, from the fields of its own part of a nested argument tree."""
        if fields:
            raise arguments.misfit(line, "(): nothing", part)
        return ()
