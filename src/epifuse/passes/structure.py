"""The structure of an epilogue for all extents: its typed graph, its identity, and what each provider lowers it to.

Types hold axes and not extents, so that one graph serves every size. Extents of zero and one, and extents that are
equal, make classes of their own, because an operand is aligned with the axes by its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from epifuse import passes
from epifuse.base.cache import LRU
from epifuse.base.errors import EpifuseError
from epifuse.base.lazy import cached_property
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
    """The typed graph, and its identity: `digest`, and `binding`, the names in the order of the digest.

    The two together determine the graph. `works` maps a provider to what it lowered the graph to. `exact` are the
    extents that the structure is limited to if it does not hold for its whole class: for instance because the number of
    values that were reduced is a constant of the graph.
    """

    graph: Graph
    digest: str
    binding: tuple[str, ...]
    exact: Mapping[str, int] = field(default_factory=dict)
    works: dict[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def reduced(self) -> frozenset[Node]:
        """Results of reductions, and values computed from them that vary over no further factors."""
        found: set[Node] = set()
        for node in self.graph.nodes:
            over = {factor for arg in node.args if arg in found for factor in self.graph.types[arg].factors}
            is_made = not found.isdisjoint(node.args) and over.issuperset(self.graph.types[node].factors)
            if node.op == "reduce" or is_made:
                found.add(node)
        return frozenset(found)

    @staticmethod
    def of(graph: Graph, problem: Problem, exact: Mapping[str, int] | None = None) -> Structure:
        """The structure of a typed graph."""
        return Structure(graph, *passes.identity(graph, problem), exact or {})

    def work(self, provider: str, lower: Callable[[Graph, Problem], Work], problem: Problem) -> Work:
        """What `provider` lowers the graph to. `lower` is called once, with the first problem."""
        found = self.works.get(provider)
        if found is None:
            # Two threads may both lower it; both get the result that was stored first.
            found = self.works.setdefault(provider, lower(self.graph, problem))
        return found  # type: ignore[no-any-return]  # by provider, so of its own type


STRUCTURES: LRU[Hashable, Structure] = LRU(256)


def structure_of(parsed: Parsed, problem: Problem) -> Structure:
    """The structure of a parsed epilogue for this problem. Raises `EpilogueTypeError` if it cannot be typed."""
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
    """The extents of `problem` that its structure must be exact in, if `structure` does not hold for it; else empty.

    These are the extents in which `structure` is exact. They are all extents if the shape of an operand does not fit
    its dims: a part of N that was as long as M in the first problem of a class may not be so in this one.
    """
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
    """The class of a problem. Problems of one class share the structure of the written `graph`, unless it is exact."""
    extents = problem.extents
    axes: dict[int, str] = {}
    for axis in "lmn":
        if (extent := extents[axis]) > 1:
            axes[extent] = axes.get(extent, "") + axis
    symbol = axes.get  # the axes that have an extent; an extent of no axis stands for itself
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
    """Whether the meaning of `graph` depends on an extent other than N: whether other rows give another graph than
    `typed`.

    The other extents are primes that do not divide the actual ones. So a number in the epilogue that divides an actual
    extent does not divide its replacement.
    """
    if not _reads_extents(graph) or not (others := other_rows(problem.extents)):
        return False
    try:
        return str(passes.typed(graph, problem.with_others(others))) != str(typed)
    except EpifuseError:
        return True


def other_rows(extents: Mapping[str, int]) -> dict[int, int]:
    """Other extents for M and for the number of batches, by the actual ones. Extents of 0, 1 and N are left out: they
    are the same for a whole class."""
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
