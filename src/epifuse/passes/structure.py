"""What an epilogue is whatever the extents: its typed graph, its identity, and what each provider makes of it, once.

Types hold axes and not extents, so that one graph serves every size. Extents of zero and one are classes of their own,
and so are extents that are equal: an operand is aligned with the axes by its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from epifuse import passes
from epifuse.base.cache import LRU
from epifuse.base.errors import EpifuseError
from epifuse.frontend import Parsed
from epifuse.fusion.operations import OPERATIONS
from epifuse.ir import Graph, Node
from epifuse.ir.types import dim_size
from epifuse.passes.eliminate_reductions import counted_axes
from epifuse.request.problem import Problem, TensorInfo
from epifuse.request.views import Seen, after

Work = TypeVar("Work")


@dataclass(frozen=True, eq=False)
class Structure:
    """The typed graph, and its identity: with the names in the order of the digest it determines the graph.

    `works` holds by provider what it lowered the graph to. `exact` are the extents that it holds for, where it does not
    hold for all of its class: where the number of values that were reduced is a constant of the graph.
    """

    graph: Graph
    digest: str
    binding: tuple[str, ...]
    exact: Mapping[str, int] = field(default_factory=dict)
    works: dict[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def reduced(self) -> frozenset[Node]:
        """Results of reductions, and what is made of such and varies over nothing else."""
        found: set[Node] = set()
        for node in self.graph.nodes:
            over = {factor for arg in node.args if arg in found for factor in self.graph.types[arg].factors}
            is_made = not found.isdisjoint(node.args) and over.issuperset(self.graph.types[node].factors)
            if node.op == "reduce" or is_made:
                found.add(node)
        return frozenset(found)

    @staticmethod
    def of(graph: Graph, problem: Problem, exact: Mapping[str, int] | None = None) -> Structure:
        """The structure of a graph that is typed already."""
        return Structure(graph, *passes.identity(graph, problem), exact or {})

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
    graph, exact = parsed.graph, {}
    key: tuple[Hashable, ...] = parsed.key, layout_class(graph, problem)
    while (found := STRUCTURES.get(key)) is not None and (exact := _differing(found, problem)):
        key = *key, *exact.items()
    if found is None:
        typed = passes.typed(graph, problem)
        axes = problem.extents if reads_rows(graph, typed, problem) else (*exact, *counted_axes(typed))
        exact = {axis: problem.extents[axis] for axis in axes}
        found = STRUCTURES.put(key, Structure.of(passes.finished(typed, problem), problem, exact))
    return found


def _differing(structure: Structure, problem: Problem) -> dict[str, int]:
    """The extents by which a structure of this class does not hold for the problem: those that it is exact in, and all
    where operands have others than the dims that they are loaded with. A part of N that was as long as M in the first
    problem of a class may not be so in this one."""
    extents = problem.extents
    if not structure.exact.items() <= extents.items():
        return {axis: extents[axis] for axis in structure.exact}
    for node in structure.graph.loads() if structure.exact != extents else ():
        load, info = node.attr, problem.by_name.get(node.attr.name)
        if isinstance(info, TensorInfo) and (own := after(Seen(info.shape, info.strides), load.views)) is not None:
            pairs = zip(own.shape, load.dims, strict=True)
            if any(extent not in (1, dim_size(dim, extents)) for extent, dim in pairs):
                return dict(extents)
    return {}


def layout_class(graph: Graph, problem: Problem) -> Hashable:
    """Problems of one class have one structure for the `graph` as written, unless that is exact."""
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
    columns = extents["n"] if _reads_extents(graph) else None
    product = len(problem.a.shape), len(problem.b.shape), problem.a.dtype, problem.b.dtype, problem.accumulator
    scaled = tuple([name for name, _ in problem.scales])
    return product, scaled, sizes, operands, problem.accumulated, problem.constraints, columns


def reads_rows(graph: Graph, typed: Graph, problem: Problem) -> bool:
    """Whether what a `graph` means follows from another extent than N: whether it is `typed` otherwise for other rows.

    Those are primes that do not divide the rows there are, so nothing divides them that is written as a number and
    divides these.
    """
    if not _reads_extents(graph) or not (others := other_rows(problem.extents)):
        return False
    try:
        return str(passes.typed(graph, problem.with_others(others))) != str(typed)
    except EpifuseError:
        return True


def other_rows(extents: Mapping[str, int]) -> dict[int, int]:
    """Other extents for M and for that of batches, by their own, where a class has several."""
    found: dict[int, int] = {}
    for axis in "lm":
        if (own := extents[axis]) not in (0, 1, extents["n"], *found):
            free = (prime for prime in _PRIMES if own % prime and prime not in (extents["n"], *found.values()))
            found[own] = next(free)
    return found


_PRIMES = (101, 103, 107, 109, 113, 127, 131, 137)


def _reads_extents(graph: Graph) -> bool:
    return not _READ_EXTENTS.isdisjoint(graph.ops)


_READ_EXTENTS = frozenset(name for name, operation in OPERATIONS.items() if operation.reads_extents)
