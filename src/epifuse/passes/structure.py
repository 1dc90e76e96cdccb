"""What an epilogue is whatever the extents: its typed graph, its identity, and what each provider makes of it, once.

Types hold axes and not extents, so that one graph serves every size. Extents of zero and one are classes of their own,
and so are extents that are equal: an operand is aligned with the axes by its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from epifuse import passes
from epifuse.base.cache import LRU
from epifuse.frontend import Parsed
from epifuse.fusion.operations import OPERATIONS
from epifuse.ir import Graph
from epifuse.request.problem import Problem, TensorInfo

Work = TypeVar("Work")


@dataclass(frozen=True, eq=False)
class Structure:
    """The typed graph, and its identity: with the names in the order of the digest it determines the graph.

    `works` holds by provider what it lowered the graph to.
    """

    graph: Graph
    digest: str
    binding: tuple[str, ...]
    works: dict[str, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(graph: Graph, problem: Problem) -> Structure:
        """The structure of a graph that is typed already."""
        return Structure(graph, *passes.identity(graph, problem))

    def work(self, provider: str, lower: Callable[[Graph, Problem], Work], problem: Problem) -> Work:
        """What `provider` lowers the graph to; asked once, of the first problem."""
        found = self.works.get(provider)
        if found is None:
            # Two threads may both lower it; both get the one that was first.
            found = self.works.setdefault(provider, lower(self.graph, problem))
        return found  # type: ignore[no-any-return]  # by provider, so of its own type


STRUCTURES: LRU[Hashable, Structure] = LRU(256)


def structure_of(parsed: Parsed, problem: Problem) -> Structure:
    """The structure of an epilogue as parsed. Raises `EpilogueTypeError` for what it cannot mean."""
    graph = parsed.graph
    key = parsed.key, layout_class(graph, problem)
    if (found := STRUCTURES.get(key)) is not None:
        return found
    return STRUCTURES.put(key, Structure.of(passes.run(graph, problem), problem))


def layout_class(graph: Graph, problem: Problem) -> Hashable:
    """Problems of one class have one structure for the `graph` as written."""
    extents = problem.extents
    axes: dict[int, str] = {}
    for axis in "lmn":
        if (extent := extents[axis]) > 1:
            axes[extent] = axes.get(extent, "") + axis
    symbol = axes.get  # of an extent; those of no axis stand for themselves
    sizes = tuple([symbol(extents[axis], extents[axis]) for axis in "lmn"])
    operands = tuple(
        [
            (name, tuple([symbol(extent, extent) for extent in info.shape]), info.dtype)
            if isinstance(info, TensorInfo)
            else (name, info.kind)
            for name, info in problem.operands
        ]
    )
    exact = None if _READ_EXTENTS.isdisjoint(graph.ops) else tuple(extents.values())
    product = len(problem.a.shape), len(problem.b.shape), problem.a.dtype, problem.b.dtype, problem.accumulator
    return product, sizes, operands, problem.accumulated, problem.constraints, exact


_READ_EXTENTS = frozenset(name for name, operation in OPERATIONS.items() if operation.reads_extents)
