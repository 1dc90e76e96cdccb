"""Segments of a row: groups of neighbouring columns, as a reshape cuts them, that one tile holds. Imports no cutlass.

The reduction of a segment needs no other tile: the lanes that share a row know its result as soon as the segment's
subtiles are walked. So a tile is walked in blocks of whole segments. A block is walked as often as values of its
segments are needed, before the next block begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from epifuse.ir import Factor, Graph, Node, Type
from epifuse.providers.cutedsl.design import SUBTILE

STEP = 8
"""Columns of the smallest segment: all lanes that share a row hold some of them. Others have a multiple of these."""


def width(node: Node) -> int:
    """The columns of each segment that a reduction reduces. 0 if it reduces a whole axis, or columns that are no
    neighbours."""
    found = 1
    for axis, stride, extent in sorted(node.attr[1], key=lambda factor: factor.stride):
        if axis != "n" or stride != found or extent is None:
            return 0
        found *= extent
    return found


def widths(graph: Graph) -> tuple[int, ...]:
    """The widths of all reductions of segments in the graph, in columns, in ascending order."""
    if "reduce" not in graph.ops:
        return ()
    return tuple(sorted({width(node) for node in graph.nodes if node.op == "reduce"} - {0}))


def values(graph: Graph) -> frozenset[Node]:
    """The nodes with one value for each segment: reductions of segments, and what is computed from them."""
    finest = next(iter(widths(graph)), 0)
    found: set[Node] = set()
    for node in graph.nodes if finest else ():
        is_reduced = node.op == "reduce" and width(node) > 0
        if is_reduced or (not found.isdisjoint(node.args) and not _is_finer(graph.types[node], finest)):
            found.add(node)
    return frozenset(found)


def _is_finer(known: Type, finest: int) -> bool:
    return any(factor.axis == "n" and factor.stride % finest for factor in known.factors)


def span(graph: Graph) -> int:
    """Columns of a block: the least number that holds whole segments, whole groups of combined columns, and whole
    subtiles. 0 if the graph has neither segments nor combined columns."""
    ends = [*widths(graph), *(factor.stride * (factor.extent or 1) for factor in picked(graph))]
    return math.lcm(SUBTILE[1], *ends) if ends else 0


def picked(graph: Graph) -> frozenset[Factor]:
    """The factors along which nodes pick one place, so that columns are combined."""
    if "pick" not in graph.ops:
        return frozenset()
    return frozenset(factor for node in graph.nodes if node.op == "pick" for factor, _ in node.attr)


def are_all_columns(factors: Iterable[Factor], extents: Mapping[str, int]) -> bool:
    """Whether a value with these factors has one element for each column of the result."""
    return math.prod(factor.size(extents) for factor in factors if factor.axis == "n") == extents["n"]
