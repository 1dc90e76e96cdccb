"""Read a visitor tree into a graph: the same one, with the same digest, to which a Python function is parsed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from epifuse.base.errors import Loc, fail
from epifuse.forms.evt.arguments import prepared, same_number
from epifuse.forms.evt.outline import Line, outline
from epifuse.forms.evt.part import Part, stores_its_result
from epifuse.frontend import Parsed
from epifuse.frontend.apply import Calls, placed
from epifuse.frontend.context import Visit
from epifuse.frontend.statements import drive
from epifuse.ir import Builder, Graph, Load, Node, Output

_NAME = re.compile(r"[^\W\d]\w*\Z")


def parsed(tree: Part) -> Parsed:
    """`tree` as an epilogue. Raises `ArgumentError`, or `EpilogueSyntaxError` for a function in the tree."""
    lines = outline(tree)
    least, _ = tree.inputs
    if least:
        raise fail("tree_arity", lines[0].place, node=lines[0].label, want=least, have=0)
    reading = Reading(iter(lines))
    result = drive(reading.visit(tree, reading.builder.node("accum")))
    if not stores_its_result(tree):
        reading.store("D", result, lines[0].place, first=True)
    calls = reading.calls
    graph = Graph(
        (*reading.operands, *calls.captures),
        tuple(reading.outputs.values()),
        tuple(calls.effects),
        reading.builder.locs,
        checked=tuple(calls.checked),
    )
    defaults = {name: value for name, value in reading.operands.items() if value is not None}
    return Parsed(
        "visitor tree",
        graph,
        tuple(reading.operands),
        defaults,
        calls.captures,
        tuple(calls.guards),
        placed(lines[0].place),
        partial(prepared, lines, frozenset((*reading.operands, *reading.outputs))),
    )


@dataclass
class Reading:
    """Reads one tree: visits its nodes in the order of the lines, and collects operands and outputs by name."""

    lines: Iterator[Line]
    builder: Builder = field(default_factory=Builder)
    operands: dict[str, float | None] = field(default_factory=dict)
    outputs: dict[str, Output] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.calls = Calls(self.builder)

    def visit(self, tree: Any, acc: Node) -> Visit:
        """The value of a whole tree, in which `acc` is the value of AccFetch."""
        line = next(self.lines)
        return (yield tree.visit(self, line, acc)) if tree.below else line.node.read(self, line, [], acc)

    def operand(self, name: str, default: float | None, line: Line, access: str = "") -> Node:
        """A load of operand `name`, with the claim that the operand has the class `access`, by default that of the node
        at `line`: "scalar", "row", "column", "tile", or "any" for no claim."""
        self.check_name(name, line.place, taken=name in self.outputs, reserved=("accum",))
        known = self.operands.get(name)
        if known is None:
            self.operands[name] = default
        elif default is not None and not same_number(default, known):
            raise fail("tree_default", line.place, name=name, first=known, second=default)
        load = self.builder.node("load", attr=Load(name), locs=(line.place,))
        access = access or line.node.access
        claim = (access, line.label)
        return load if access == "any" else self.builder.node("access", load, attr=claim, locs=(line.place,))

    def store(self, name: str, value: Node, place: Loc, *, first: bool = False) -> Node:
        """Make `value` the output `name`, and return it. With `first` it precedes all other outputs."""
        self.check_name(name, place, taken=name in self.outputs or name in self.operands)
        stored = {name: Output(name, value)}
        self.outputs = stored | self.outputs if first else self.outputs | stored
        return value

    def check_name(self, name: Any, place: Loc, *, taken: bool, reserved: tuple[str, ...] = ()) -> None:
        if not isinstance(name, str) or not _NAME.match(name) or name in reserved:
            raise fail("tree_name", place, name=name)
        if taken:
            raise fail("tree_name_twice", place, name=name)
