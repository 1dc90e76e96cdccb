"""What a kernel is generated from: its design, and the graph with its accesses in order. Imports no cutlass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from epifuse.ir import Factor, Graph, Load, Node, Output
from epifuse.providers.cpu.space import Space
from epifuse.providers.cutedsl.addresses import Along
from epifuse.providers.cutedsl.precision import Accuracy
from epifuse.providers.cutedsl.prints import Print
from epifuse.providers.cutedsl.ways import Access
from epifuse.providers.cutedsl.weave import Order

Edge = Literal["nothing", "subtiles", "values"]
"""What of the last tiles lies outside the result. Whole subtiles are left out at the cost of one choice for each."""
NO_EDGES: tuple[Edge, Edge] = ("nothing", "nothing")


@dataclass(frozen=True, eq=False)
class Program:
    """The epilogue as a kernel sees it: its graph, how each load arrives, how each output leaves, and how exactly each
    value is computed. `edges`: what reductions leave out along M and N. `prints` are printed after the launch. `order`
    is that of the rows of two parts in B, where the graph takes parts of a row. `columns` are those of a region of N,
    where a launch has several: its graph, operands and outputs count from the first of them."""

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
        """Their names."""
        return tuple(node.attr.name for node in self.numbers)

    @cached_property
    def reads(self) -> tuple[tuple[Load, Access, Along], ...]:
        """The loads of `tensors`, with their dims."""
        return tuple((node.attr, access, Along.of(node.attr.dims, self.factors)) for node, access in self.tensors)

    @cached_property
    def writes(self) -> tuple[tuple[Output, Access, Along], ...]:
        """What is stored, with its dims."""
        stores = zip(self.graph.outputs, self.stores, strict=True)
        return tuple((output, access, Along.of(output.dims, self.factors)) for output, access in stores)

    @cached_property
    def staged(self) -> tuple[Access, ...]:
        """The loads that come in tiles."""
        return tuple(access for _, access in self.loads if access.travels.staged)

    @cached_property
    def coming(self) -> tuple[Access, ...]:
        """The loads of which every subtile reads values."""
        return tuple(access for _, access in self.loads if access.travels.by_value)
