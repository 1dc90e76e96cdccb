"""What a kernel is generated from: its design, and the graph with its accesses in order. Imports no cutlass."""

from __future__ import annotations

from dataclasses import dataclass

from epifuse.ir import Graph, Load, Node


@dataclass(frozen=True)
class Design:
    """One way to run a GEMM: tile (m, n), cluster (m, n), schedule, stages of A and B, clusters of m in a raster band.

    Cooperative: two warp groups share a tile. Ping-pong: each has a tile of its own, and the epilogue of one runs
    beside the main loop of the other.
    """

    tile: tuple[int, int]
    cluster: tuple[int, int]
    pingpong: bool
    stages: int = 0
    raster: int = 8

    @property
    def schedule(self) -> str:
        """Its name, as `Constraints.schedule` spells it."""
        return "pingpong" if self.pingpong else "cooperative"

    def __str__(self) -> str:
        return f"{self.tile[0]}x{self.tile[1]} {self.schedule}, cluster {self.cluster[0]}x{self.cluster[1]}"


@dataclass(frozen=True, eq=False)
class Program:
    """The epilogue as a kernel sees it. `staged` is the output that leaves through shared memory."""

    graph: Graph
    tensors: tuple[Node, ...]
    scalars: tuple[Node, ...]
    staged: int

    @staticmethod
    def of(graph: Graph, host_numbers: frozenset[str], staged: int) -> Program:
        """Sort the loads: numbers travel as arguments, everything else as a tensor."""
        loads = graph.loads()
        scalars = tuple(node for node in loads if _name(node) in host_numbers)
        return Program(graph, tuple(node for node in loads if node not in scalars), scalars, staged)


def _name(node: Node) -> str:
    assert isinstance(node.attr, Load)
    return node.attr.name
