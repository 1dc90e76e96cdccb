"""A row in equal parts, seen as so many values beside each other: what a loop over the columns of one part computes.

A value that varies over the parts becomes one for each of them, and a part of it is the one that was picked. What is
left knows no parts: it varies over the columns of one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from epifuse.ir import Builder, Dims, Factor, Graph, Load, Node, Output, Type
from epifuse.ir.graph import topological
from epifuse.ir.types import canonical, factors_of

_MOST = 8
"""Parts that are computed beside each other: their values are held in registers."""


class Unfolded(NamedTuple):
    """`graph` is over the columns of one of the parts, which are `width` wide. An accum has the number of its part.

    `outputs` has for each output of it which output of the epilogue it is, and which part of that, None for all of it.
    """

    graph: Graph
    width: int
    outputs: tuple[tuple[str, int | None], ...]


def unfolded(graph: Graph, extents: Mapping[str, int]) -> Unfolded | None:
    """A graph with parts as one without, or None where it is cut in any other way."""
    factors = {factor for type_ in graph.types.values() for factor in type_.factors if factor.axis == "n"}
    factors |= {factor for output in graph.outputs for factor in factors_of(output.dims or ()) if factor.axis == "n"}
    inner = next((factor for factor in factors if factor.stride == 1), None)
    if inner is None or inner.extent is None:
        return None
    outer = Factor("n", inner.extent)
    if not factors <= {inner, outer} or outer.size(extents) > _MOST:
        return None
    walk = _Walk(graph, inner, outer, outer.size(extents))
    outputs: list[Output] = []
    parts: list[tuple[str, int | None]] = []
    try:
        for output in graph.outputs:
            dims = output.dims or ()
            varies = outer in factors_of(dims)
            for place in range(walk.count) if varies else (None,):
                name = output.name if place is None else f"{output.name} {place}"
                outputs.append(Output(name, walk.value(output.node, place), walk.dims(dims), output.dtype))
                parts.append((output.name, place))
    except _OtherwiseError:
        return None
    made = replace(graph, outputs=tuple(outputs), types=walk.builder.types, locs={}, stages={})
    return Unfolded(made, inner.extent, tuple(parts))


class _OtherwiseError(Exception):
    """Something is neither of one part nor the same in each."""


@dataclass(eq=False)
class _Walk:
    """Values by node and part."""

    graph: Graph
    inner: Factor
    outer: Factor
    count: int

    def __post_init__(self) -> None:
        self.builder = Builder()
        self.made: dict[tuple[Node, int | None], Node] = {}

    def value(self, root: Node, place: int | None) -> Node:
        """The value of a node in one part; without a number where it is the same in each."""
        for node in topological((root,)):
            places = range(self.count) if self.outer in self.graph.types[node].factors else (None,)
            for at in places:
                if (node, at) not in self.made:
                    self.made[node, at] = self.step(node, at)
        return self.made[root, place if self.outer in self.graph.types[root].factors else None]

    def step(self, node: Node, place: int | None) -> Node:
        if node.op == "pick":
            ((factor, at), *others) = node.attr
            if others or factor != self.outer:
                raise _OtherwiseError
            return self.arg(node.args[0], at)
        if node.op == "accum":
            return self.emit("accum", node, attr=place)
        if node.op == "load":
            return self.emit("load", node, attr=self.load(node.attr, place))
        if node.op == "index":
            if node.attr != (self.outer,):
                raise _OtherwiseError
            return self.emit("const", node, attr=place)
        if node.op not in ("const", "where", "eq") and self.graph.types[node].kind in ("int32", "int64"):
            raise _OtherwiseError
        args = [self.arg(arg, place) for arg in node.args]
        if node.op == "eq" and all(arg.op == "const" for arg in args):  # which of several joined values it is
            return self.emit("const", node, attr=args[0].attr == args[1].attr)
        if node.op == "where" and args[0].op == "const":
            return args[1] if args[0].attr else args[2]
        return self.emit(node.op, node, *args, attr=node.attr)

    def arg(self, node: Node, place: int | None) -> Node:
        if place is None and self.outer in self.graph.types[node].factors:
            raise _OtherwiseError  # it is reduced over the parts
        return self.made[node, place if self.outer in self.graph.types[node].factors else None]

    def emit(self, op: str, like: Node, *args: Node, attr: Hashable = None) -> Node:
        made = self.builder.node(op, *args, attr=attr)
        type_ = self.graph.types[like]
        kept = canonical(self.whole(factor) for factor in type_.factors if factor != self.outer)
        self.builder.types.setdefault(made, Type(type_.kind, kept if op != "const" else (), type_.host))
        return made

    def load(self, load: Load, place: int | None) -> Load:
        """An operand, or its part."""
        dims, views = load.dims or (), load.views
        for at, dim in enumerate(dims):
            if self.outer not in dim:
                continue
            if dim == (self.outer, self.inner) and place is not None:
                start = place * (self.inner.extent or 0)
                views = (*views, ("part", (at, start, start + (self.inner.extent or 0), 1, False)))
            else:
                raise _OtherwiseError
        return load._replace(views=views, dims=self.dims(dims))

    def dims(self, dims: Dims) -> Dims:
        """Dims of one part: without that of the parts, where it is one of its own."""
        kept = [tuple(self.whole(f) for f in dim if f != self.outer) for dim in dims if dim != (self.outer,)]
        return tuple(kept)

    def whole(self, factor: Factor) -> Factor:
        """Columns are counted in one part."""
        return Factor("n") if factor == self.inner else factor
