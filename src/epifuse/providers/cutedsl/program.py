"""The epilogue that a kernel is generated from: its graph, with all accesses in order. Imports no cutlass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from epifuse.base.lazy import cached_property
from epifuse.ir import Factor, Graph, Load, Node, Output
from epifuse.providers.cpu.space import Space
from epifuse.providers.cutedsl.addresses import Along
from epifuse.providers.cutedsl.precision import Accuracy
from epifuse.providers.cutedsl.prints import Print
from epifuse.providers.cutedsl.ways import Access
from epifuse.providers.cutedsl.weave import Order

Edge = Literal["nothing", "subtiles", "values"]
"""What of the last tiles lies outside the result: nothing, whole subtiles, or also single values. A whole subtile is
left out by one branch."""
NO_EDGES: tuple[Edge, Edge] = ("nothing", "nothing")


@dataclass(frozen=True, eq=False)
class Program:
    """The epilogue as a kernel sees it: its graph, how each load arrives (`loads`), how each output leaves (`stores`),
    and how exactly each value is computed (`accuracies`).

    - `edges`: what reductions leave out along M and along N.
    - `prints`: what is printed after the launch.
    - `order`: the order of the rows of two parts in B, if the graph takes parts of a row.
    - `columns`: the (start, stop) of a region of N, if a launch has several regions. Columns in the graph, operands and
      outputs of a region then count from `start`.
    """

    graph: Graph
    loads: tuple[tuple[Node, Access], ...]
    stores: tuple[Access, ...]
    accuracies: Mapping[Node, Accuracy] = field(default_factory=dict)
    edges: tuple[Edge, Edge] = NO_EDGES
    prints: tuple[Print, ...] = ()
    order: Order = ""
    columns: tuple[int, int] | None = None

    @cached_property
    def factors(self) -> tuple[Factor, ...]:
        """The finest factors of the axes."""
        return Space.of(self.graph, {}).factors

    @cached_property
    def tensors(self) -> tuple[tuple[Node, Access], ...]:
        """Loads of tensors, in the order in which the kernel takes them."""
        return tuple(load for load in self.loads if not load[1].travels.is_number)

    @cached_property
    def numbers(self) -> tuple[Node, ...]:
        """Loads of numbers, in the order in which the kernel takes them."""
        return tuple(node for node, access in self.loads if access.travels.is_number)

    @cached_property
    def number_names(self) -> tuple[str, ...]:
        """The names of these numbers, in the same order."""
        return tuple(node.attr.name for node in self.numbers)

    @cached_property
    def reads(self) -> tuple[tuple[Load, Access, Along], ...]:
        """For each of `tensors`: its load, how it arrives, and its dims."""
        return tuple((node.attr, access, Along.of(node.attr.dims, self.factors)) for node, access in self.tensors)

    @cached_property
    def writes(self) -> tuple[tuple[Output, Access, Along], ...]:
        """For each output: the output, how it leaves, and its dims."""
        stores = zip(self.graph.outputs, self.stores, strict=True)
        return tuple((output, access, Along.of(output.dims, self.factors)) for output, access in stores)

    @cached_property
    def staged(self) -> tuple[Access, ...]:
        """The accesses of loads that come by TMA, in tiles."""
        return tuple(access for _, access in self.loads if access.travels.staged)

    @cached_property
    def coming(self) -> tuple[Access, ...]:
        """The accesses of loads from which each subtile reads values of its own."""
        return tuple(access for _, access in self.loads if access.travels.by_value)
