"""Unfold a row that is cut into parts: all parts are computed together, in one loop over the columns of one part.

The columns of a part are contiguous, or the parts are interleaved: the first column of each part, then the second of
each part, and so on. A value that varies over the parts becomes one value for each part, and taking a part of it means
taking one of these values. The unfolded graph has no parts: its values vary over the columns of one part.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from epifuse.ir import Builder, Dims, Factor, Graph, Load, Node, Output, Type
from epifuse.ir.graph import topological
from epifuse.ir.types import canonical, factors_of

_MOST = 8
"""The most parts of a row that are computed together, because the values of all of them are held in registers."""

PartIndex = tuple[tuple[Factor, int], ...]
"""One of the parts: its place along each of the factors of N that number the parts."""


class Unfolded(NamedTuple):
    """The unfolded `graph`, over the columns of one part. The attribute of an accum is the number of its part.

    `columns` is the factor of the columns of a part, and `width` is how many these are. `outputs` has for each output
    of the graph the name of the epilogue's output, and the part of it.
    """

    graph: Graph
    columns: Factor
    width: int
    outputs: tuple[tuple[str, PartIndex], ...]

    @property
    def column_stride(self) -> int:
        """The distance from one column of a part to the next, in elements; 1 if they are contiguous."""
        return self.columns.stride


def unfolded(graph: Graph, extents: Mapping[str, int]) -> Unfolded | None:
    """Unfold a graph whose rows are cut into at most `_MOST` parts, or return None if they are cut in another way."""
    found = {factor for type_ in graph.types.values() for factor in type_.factors}
    found |= {factor for output in graph.outputs for factor in factors_of(output.dims or ())}
    factors = canonical(factor for factor in found if factor.axis == "n")
    ends = dict.fromkeys((*factors[:1], *factors[-1:]))
    for columns in sorted(ends, key=lambda factor: -factor.size(extents)):
        parts = tuple(factor for factor in factors if factor != columns)
        several = 1 < math.prod(factor.size(extents) for factor in parts) <= _MOST
        if several and (walked := _Walk(graph, columns, parts, extents).unfolded()) is not None:
            return walked
    return None


class _NotUnfoldableError(Exception):
    """The graph cannot be unfolded: a value neither belongs to one part nor is the same in all parts."""


@dataclass(eq=False)
class _Walk:
    """Makes the unfolded graph. `made` has the new nodes by old node and part."""

    graph: Graph
    columns: Factor
    parts: tuple[Factor, ...]
    extents: Mapping[str, int]

    def __post_init__(self) -> None:
        self.builder = Builder()
        self.made: dict[tuple[Node, PartIndex], Node] = {}

    def unfolded(self) -> Unfolded | None:
        """The graph with an output for each part of each output, or None if it cannot be unfolded."""
        outputs: list[Output] = []
        found: list[tuple[str, PartIndex]] = []
        try:
            for output in self.graph.outputs:
                for places in self.places(factors_of(output.dims or ())):
                    name = " ".join([output.name, *(str(place) for _, place in places)])
                    dims = self.dims(output.dims or ())
                    outputs.append(Output(name, self.value(output.node, places), dims, output.dtype))
                    found.append((output.name, places))
        except _NotUnfoldableError:
            return None
        made = replace(self.graph, outputs=tuple(outputs), types=self.builder.types, locs={}, stages={})
        return Unfolded(made, self.columns, self.columns.size(self.extents), tuple(found))

    def places(self, factors: tuple[Factor, ...]) -> Iterator[PartIndex]:
        """Yield every part of a value that varies over these factors."""
        own = [factor for factor in self.parts if factor in factors]
        for each in product(*(range(factor.size(self.extents)) for factor in own)):
            yield tuple(zip(own, each, strict=True))

    def value(self, root: Node, places: PartIndex) -> Node:
        """The new node of `root` in one part. Makes the nodes below it, in all parts."""
        for node in topological((root,)):
            for own in self.places(self.graph.types[node].factors):
                if (node, own) not in self.made:
                    self.made[node, own] = self.step(node, own)
        return self.arg(root, places)

    def step(self, node: Node, places: PartIndex) -> Node:
        if node.op == "pick":
            if not {factor for factor, _ in node.attr} <= set(self.parts):
                raise _NotUnfoldableError
            return self.arg(node.args[0], (*places, *node.attr))
        if node.op == "accum":
            return self.emit("accum", node, attr=self.number(self.parts, places))
        if node.op == "load":
            return self.emit("load", node, attr=self.load(node.attr, places))
        if node.op == "index":
            if not set(node.attr) <= set(self.parts):
                raise _NotUnfoldableError
            return self.emit("const", node, attr=self.number(node.attr, places))
        if node.op not in ("const", "where", "eq") and self.graph.types[node].kind in ("int32", "int64"):
            raise _NotUnfoldableError
        args = [self.arg(arg, places) for arg in node.args]
        if node.op == "eq" and all(arg.op == "const" for arg in args):  # it chooses among joined values, by the part
            return self.emit("const", node, attr=args[0].attr == args[1].attr)
        if node.op == "where" and args[0].op == "const":
            return args[1] if args[0].attr else args[2]
        return self.emit(node.op, node, *args, attr=node.attr)

    def arg(self, node: Node, places: PartIndex) -> Node:
        known, varies = dict(places), self.graph.types[node].factors
        own = tuple((factor, known.get(factor, -1)) for factor in self.parts if factor in varies)
        if any(place < 0 for _, place in own):
            raise _NotUnfoldableError  # its user reduces it over the parts
        return self.made[node, own]

    def emit(self, op: str, like: Node, *args: Node, attr: Hashable = None) -> Node:
        made = self.builder.node(op, *args, attr=attr)
        type_ = self.graph.types[like]
        kept = canonical(self.whole(factor) for factor in type_.factors if factor not in self.parts)
        self.builder.types.setdefault(made, Type(type_.kind, kept if op != "const" else (), type_.host))
        return made

    def load(self, load: Load, places: PartIndex) -> Load:
        """The load of an operand, or of one part of it."""
        dims, views = load.dims or (), load.views
        for at, dim in enumerate(dims):
            if set(self.parts).isdisjoint(dim):
                continue
            if self.columns not in dim:
                raise _NotUnfoldableError
            start = self.number(dim, places)
            apart = math.prod(factor.size(self.extents) for factor in dim[dim.index(self.columns) + 1 :])
            stop = start + (self.columns.size(self.extents) - 1) * apart + 1
            views = (*views, ("part", (at, start, stop, apart, False)))
        return load._replace(views=views, dims=self.dims(dims))

    def number(self, factors: tuple[Factor, ...], places: PartIndex) -> int:
        """The position of a part's first column along these factors, which are given outermost first."""
        known, number = dict(places), 0
        for factor in factors:
            number = number * factor.size(self.extents) + known.get(factor, 0)
        return number

    def dims(self, dims: Dims) -> Dims:
        """The dims of one part: those that only number parts are left out."""
        kept = [tuple(self.whole(f) for f in dim if f not in self.parts) for dim in dims]
        return tuple(own for own, dim in zip(kept, dims, strict=True) if own or not dim)

    def whole(self, factor: Factor) -> Factor:
        """`factor`, or if it is that of the columns of a part all of N, because columns are counted within one part."""
        return Factor("n") if factor == self.columns else factor
