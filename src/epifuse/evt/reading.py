"""From a visitor tree to the graph: the same graph, with the same digest, that a Python function is parsed to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

from epifuse.errors import Loc, fail
from epifuse.evt.arguments import prepared
from epifuse.evt.nodes import AccFetch, AuxStore, Compute, Operation, Reduction, ScalarBroadcast, is_operand
from epifuse.evt.outline import Line, outline
from epifuse.evt.tree import EVT, SplitTreeVisitor, TopologicalVisitor, stores_its_result
from epifuse.evt.visitor import Visitor
from epifuse.frontend import Parsed
from epifuse.frontend.apply import Calls, placed
from epifuse.frontend.context import Visit
from epifuse.frontend.statements import drive
from epifuse.ir import Builder, Graph, Load, Node, Output

_NAME = re.compile(r"[^\W\d]\w*\Z")


def parsed(tree: Visitor) -> Parsed:
    """`tree` as an epilogue. Raises `ArgumentError`, `EpilogueSyntaxError` for a function in it."""
    lines = outline(tree)
    least, _ = tree.inputs
    if least:
        raise fail("tree_arity", lines[0].place, node=lines[0].label, want=least, have=0)
    reading = _Reading(iter(lines))
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
        tree,
        partial(prepared, lines, frozenset((*reading.operands, *reading.outputs))),
    )


@dataclass
class _Reading:
    """Visits nodes in the order of the lines."""

    lines: Iterator[Line]
    builder: Builder = field(default_factory=Builder)
    operands: dict[str, float | None] = field(default_factory=dict)
    outputs: dict[str, Output] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.calls = Calls(self.builder)

    def visit(self, tree: Visitor, acc: Node) -> Visit:
        """The value of a whole tree; AccFetch means `acc`."""
        line = next(self.lines)
        match tree:
            case EVT(children=children):
                values = []
                for child in children:
                    values.append((yield self.visit(child, acc)))
                return self.value(line, values, acc)
            case TopologicalVisitor(edges=edges, nodes=nodes):
                found: list[Node] = []
                for sources, child in zip(edges, nodes, strict=True):
                    inputs = [found[source] for source in sources]
                    found.append(
                        self.value(next(self.lines), inputs, acc) if inputs else (yield self.visit(child, acc))
                    )
                return found[-1]
            case SplitTreeVisitor(input_tree=first, output_tree=output, aux_out_trees=others):
                value = yield self.visit(first, acc)
                result = yield self.visit(output, value)
                for other in others:
                    yield self.visit(other, value)
                return result
        return self.value(line, [], acc)

    def value(self, line: Line, values: list[Node], acc: Node) -> Node:
        """What one leaf or operator gives, and stores."""
        match line.node:
            case AccFetch():
                return acc
            case ScalarBroadcast(name=None, value=value):
                return self.builder.node("const", attr=value, locs=(line.place,))
            case ScalarBroadcast(reduction=reduction) as node:
                loads = [self.operand(name, default, line) for name, default in node.slots]
                return reduce(lambda x, y: self.calls.apply(reduction, (x, y), {}, line.place), loads)
            case Compute() as node:
                return self.calls.apply(node.function, values, self.named(node, line), line.place)
            case Operation(op=op, attr=attr):
                made = self.builder.node(op, *values, attr=attr, locs=(line.place,))
                self.calls.effects.update({made: None} if op == "debug_print" else {})
                return made
            case AuxStore(name=str() as name):
                return self.store(name, values[0], line.place)
            case Reduction() as node:
                return self.reduced(node, values[0], line)
        ((name, default),) = line.node.slots
        return self.operand(name, default, line)

    def named(self, node: Compute, line: Line) -> Mapping[str, Any]:
        """The arguments of a function that are no children: numbers, and operands by name."""
        loads = {name: self.operand(name, default, line, "scalar") for name, default in node.slots}
        return {
            parameter: loads[item if isinstance(item, str) else item[0]] if is_operand(item) else item
            for parameter, item in node.further
        }

    def operand(self, name: str, default: float | None, line: Line, access: str = "") -> Node:
        """A load, and the claim that what is handed varies as the node says."""
        self.check_name(name, line.place, taken=name in self.outputs, reserved=("accum",))
        known = self.operands.setdefault(name, default)
        if known is None:
            self.operands[name] = default
        elif default is not None and default != known:
            raise fail("tree_default", line.place, name=name, first=known, second=default)
        load = self.builder.node("load", attr=Load(name), locs=(line.place,))
        access = access or line.node.access
        claim = (access, line.label)
        return load if access == "any" else self.builder.node("access", load, attr=claim, locs=(line.place,))

    def reduced(self, node: Reduction, value: Node, line: Line) -> Node:
        """Stores the reduction, and hands its input on."""
        made = self.builder.node("reduce_axes", value, attr=(node.reduction, node.gone), locs=(line.place,))
        if node.identity is not None and not node.is_neutral(node.identity):
            start = self.builder.node("const", attr=float(node.identity), locs=(line.place,))
            made = self.calls.apply(node.again, (made, start), {}, line.place)
        self.store(str(node.name), made, line.place)
        return value

    def store(self, name: str, value: Node, place: Loc, *, first: bool = False) -> Node:
        """Makes `value` an output, and hands it on."""
        self.check_name(name, place, taken=name in self.outputs or name in self.operands)
        stored = {name: Output(name, value)}
        self.outputs = stored | self.outputs if first else self.outputs | stored
        return value

    def check_name(self, name: Any, place: Loc, *, taken: bool, reserved: tuple[str, ...] = ()) -> None:
        if not isinstance(name, str) or not _NAME.match(name) or name in reserved:
            raise fail("tree_name", place, name=name)
        if taken:
            raise fail("tree_name_twice", place, name=name)
