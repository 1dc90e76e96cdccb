"""The range of columns of N that each value of an epilogue belongs to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import isqrt, prod
from typing import NamedTuple

from epifuse.ir import Factor, Graph, Node
from epifuse.ir.types import columns_of
from epifuse.request.problem import Problem


class Columns(NamedTuple):
    """The columns from `start` up to, but without, `stop`."""

    start: int
    stop: int


class UnsplitError(Exception):
    """The value `node` cannot be computed from one range of columns, or one part of a row, alone; `reason` says why."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


WAY_OUT = "store the product, and combine its parts in PyTorch"

Spans = Mapping[Node, frozenset[Columns]]


def one_of(span: frozenset[Columns], whole: Columns) -> Columns:
    """The range that a value belongs to: `whole`, all columns, if its `span` is empty."""
    return next(iter(span), whole)


def spans(graph: Graph, problem: Problem, whole: Columns) -> Spans:
    """The range of each value, as a set of one. The set is empty if the value does not vary over columns, or only over
    those within a head.

    If equal parts meet in one operation, the result belongs to the smallest equal part that holds them all. If joined
    values need more columns than one part has, their part counts as all columns.
    """
    parts: set[Columns] = set()
    while True:
        found = _spans_beside(parts, graph, problem, whole)
        wide = {
            columns: node for node, span in found.items() for columns in span if not _fits(node, columns, graph, whole)
        }
        if not wide:
            return found
        for columns in parts & {*wide}:  # still too narrow, so it is a region and not an equal part
            told = f"joined values do not fit side by side into columns {columns.start}:{columns.stop}"
            raise UnsplitError(wide[columns], f"{told}: {WAY_OUT}")
        parts |= {*wide}


def _spans_beside(parts: Collection[Columns], graph: Graph, problem: Problem, whole: Columns) -> Spans:
    """As `spans`, if the equal parts in `parts` count as all columns."""
    widths = _widths(graph, problem)
    found: dict[Node, frozenset[Columns]] = {}
    uneven: dict[Node, bool] = {}
    read: dict[Node, bool] = {}
    for node in graph.nodes:
        read[node] = node.op not in ("accum", "region", "pick") and all(read[arg] for arg in node.args)
        below = frozenset(_meeting(node, found, read, whole))
        uneven[node] = node.op == "region" or any(uneven[arg] for arg in node.args)
        columns = taken_by(node, graph, problem)
        if columns is not None and below <= {whole} and (uneven[node] or columns not in parts):
            below = frozenset({columns})
        elif not node.args:
            below = frozenset(_varying(graph.types[node].factors, problem, whole))
        if len(below) > 1 and not uneven[node]:
            first, last = min(below).start, max(columns.stop for columns in below) - 1
            around = (Columns(first // w * w, first // w * w + w) for w in widths if first // w == last // w)
            below = frozenset({next((columns for columns in around if columns not in parts), whole)})
        if len(below) > 1:
            told = " and ".join(f"{start}:{stop}" for start, stop in sorted(below))
            raise UnsplitError(node, f"it computes with columns {told} of a row at once: {WAY_OUT}")
        found[node] = below
    return found


def _meeting(node: Node, found: Spans, read: Mapping[Node, bool], whole: Columns) -> Iterable[Columns]:
    """Yield the ranges of a node's arguments. An argument that is `read` (computed from operands and coordinates alone)
    counts as part of another argument's range if its own range lies within that one."""
    own = {columns for arg in node.args if not read[arg] for columns in found[arg]} - {whole}
    for arg in node.args:
        for columns in found[arg]:
            within = read[arg] and any(o.start <= columns.start and columns.stop <= o.stop for o in own)
            if not within or columns in own:
                yield columns


def _widths(graph: Graph, problem: Problem) -> list[int]:
    """The possible widths of equal parts of all columns, ascending. For each factor of N, a part holds the whole
    factor, or a piece of it, or lies within one of its steps."""
    n, factors = problem.extents["n"], {f for type_ in graph.types.values() for f in type_.factors if f.axis == "n"}
    ends = [(factor.stride, factor.stride * factor.size(problem.extents)) for factor in factors]
    some = {width for i in range(1, isqrt(n) + 1) if n % i == 0 for width in (i, n // i)}
    return [
        width
        for width in sorted(some)
        if all(not (step % width and width % end and (width % step or end % width)) for step, end in ends)
    ]


def _fits(node: Node, columns: Columns, graph: Graph, whole: Columns) -> bool:
    """Whether a range of columns has room for all factors of N of a value, such as those of values that were joined."""
    width = columns.stop - columns.start
    beyond = [
        factor
        for factor in graph.types[node].factors
        if factor.axis == "n" and (factor.extent is None or width % (factor.stride * factor.extent))
    ]
    return columns == whole or not beyond


def _varying(factors: Iterable[Factor], problem: Problem, whole: Columns) -> Iterable[Columns]:
    """Yield the ranges that a node without arguments, such as an operand or a coordinate, belongs to."""
    for factor in factors:
        if factor.along == "n" and factor.axis != "n":
            yield Columns(*columns_of(factor.axis, problem.extents))
        elif factor == Factor("n", factor.stride):
            yield whole


def taken_by(node: Node, graph: Graph, problem: Problem) -> Columns | None:
    """The columns that a `region` or `pick` node takes of all columns. None for any other node."""
    if node.op == "region":
        return Columns(*node.attr)
    if node.op != "pick":
        return None
    gone = {factor for factor, _ in node.attr}
    width = min(factor.stride for factor in gone)
    own = graph.types[node.args[0]].factors
    if gone != {factor for factor in own if factor.axis == "n" and factor.stride >= width}:
        return None
    if width * prod(factor.size(problem.extents) for factor in gone) != problem.extents["n"]:
        return None  # the node takes one of several joined values, which are not all columns
    start = sum(factor.stride * place for factor, place in node.attr)
    return Columns(start, start + width)
