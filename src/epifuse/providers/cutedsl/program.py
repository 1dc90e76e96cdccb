"""What a kernel is generated from: its design, and the graph with its accesses in order. Imports no cutlass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from epifuse.ir import Factor, Graph, Load, Node, Output
from epifuse.providers.cpu.space import Space
from epifuse.providers.cutedsl.addresses import Along
from epifuse.providers.cutedsl.precision import Accuracy
from epifuse.providers.cutedsl.prints import Print

Way = Literal["number", "scalar", "row", "column", "tile", "direct", "line", "finish"]
"""How an operand or output travels.

number: an argument of the launch. scalar: one load a tile. row, column: once a tile, through shared memory as 32-bit
values. tile: subtile by subtile through swizzled shared memory, by TMA. direct: between registers and where it lies.
line: once a row, by the CTA that holds where it starts. finish: once all tiles are done, of or beside merged
reductions.
"""

SUBTILE = (64, 32)
"""What one warp group's epilogue works on: 16 values a thread. Taller would break the order of the registers."""
WARP_GROUP, WARPS = 128, 4
"""Threads and warps of a warp group. Each warp has 16 rows of a subtile."""
Edge = Literal["nothing", "subtiles", "values"]
"""What of the last tiles lies outside the result. Whole subtiles are left out at the cost of one choice for each."""
NO_EDGES: tuple[Edge, Edge] = ("nothing", "nothing")


@dataclass(frozen=True)
class Access:
    """One operand or output. `axes` are those it varies over; `by_rows` says which mode of a tile is contiguous.

    `pairs`: going direct, it can go two neighbouring columns at a time; `why`: it goes direct and not by TMA. `inner`:
    the extents of the pieces of M, N and L, fastest first and without the last, where a reshape cut an axis and no
    single stride steps over the cut.
    """

    name: str
    way: Way
    axes: frozenset[str] = frozenset()
    dtype: torch.dtype = torch.float32
    by_rows: bool = True
    pairs: bool = False
    why: str = field(default="", compare=False)
    inner: tuple[tuple[int, ...], ...] = ((), (), ())

    @property
    def bytes_at_once(self) -> int:
        """What one instruction moves, going direct."""
        return self.dtype.itemsize * (2 if self.pairs else 1)


@dataclass(frozen=True)
class Design:
    """One way to run a GEMM: tile (m, n), cluster (m, n), schedule, stages, clusters along M in a raster band.

    Cooperative: two warp groups share a tile. Ping-pong: each has a tile of its own, and the epilogue of one runs
    beside the main loop of the other. A stage of A and B holds `spans` of 128 bytes along K. Stages of A and B, and
    those in which subtiles of operands arrive and subtiles of outputs leave; in how many stages of A and B operands of
    a CTA's last tile wait; how many 32-bit words of a row the CTAs of a cluster tell each other at once; registers of a
    thread that computes.
    """

    tile: tuple[int, int]
    cluster: tuple[int, int]
    pingpong: bool
    spans: int = 1
    stages: int = 0
    load_stages: int = 0
    store_stages: int = 0
    spare: int = 0
    exchanged: int = 0
    registers: int = 0
    raster: int = 0

    @property
    def schedule(self) -> str:
        """Its name, as `Constraints.schedule` spells it."""
        return "pingpong" if self.pingpong else "cooperative"

    def __str__(self) -> str:
        return f"{self.tile[0]}x{self.tile[1]} {self.schedule}, cluster {self.cluster[0]}x{self.cluster[1]}"


@dataclass(frozen=True, eq=False)
class Program:
    """The epilogue as a kernel sees it: its graph, how each load arrives, how each output leaves, and how exactly each
    value is computed. `edges`: what reductions leave out along M and N. `prints` are printed after the launch."""

    graph: Graph
    loads: tuple[tuple[Node, Access], ...]
    stores: tuple[Access, ...]
    accuracies: Mapping[Node, Accuracy] = field(default_factory=dict)
    edges: tuple[Edge, Edge] = NO_EDGES
    prints: tuple[Print, ...] = ()

    @cached_property
    def factors(self) -> tuple[Factor, ...]:
        """The finest factors of the axes."""
        return Space.of(self.graph, {}).factors

    @cached_property
    def tensors(self) -> tuple[tuple[Node, Access], ...]:
        """Loads of tensors, in the order in which the kernel takes them."""
        return tuple(load for load in self.loads if load[1].way != "number")

    @cached_property
    def numbers(self) -> tuple[Node, ...]:
        """Loads of numbers, in the order in which the kernel takes them."""
        return tuple(node for node, access in self.loads if access.way == "number")

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

    def loads_by(self, *ways: Way) -> tuple[tuple[Node, Access], ...]:
        """Loads that travel so."""
        return tuple(load for load in self.loads if load[1].way in ways)
