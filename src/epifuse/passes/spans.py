"""Which columns of N each value of an epilogue is of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import isqrt, prod
from typing import NamedTuple

from epifuse.ir import Factor, Graph, Node
from epifuse.ir.types import columns_of
from epifuse.request.problem import Problem


class Columns(NamedTuple):
    """A range of columns."""

    start: int
    stop: int


class UnsplitError(Exception):
    """What is not computed of one range, or one part of a row, alone, and why."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


WAY_OUT = "store the product, and combine its parts in PyTorch"

Spans = Mapping[Node, frozenset[Columns]]


def one_of(span: frozenset[Columns], whole: Columns) -> Columns:
    """The range that a value is of, and all columns where it varies over none."""
    return next(iter(span), whole)


def spans(graph: Graph, problem: Problem, whole: Columns) -> Spans:
    """Of each value, what it is of: one range; none where it does not vary over columns, or over those of heads alone.

    Equal parts that meet each other are of the smallest one that holds them, and those whose values lie side by side in
    more columns than one part has, of all columns.
    """
    parts: set[Columns] = set()
    while True:
        found = _spans_beside(parts, graph, problem, whole)
        wide = {
            columns: node for node, span in found.items() for columns in span if not _fits(node, columns, graph, whole)
        }
        if not wide:
            return found
        for columns in parts & {*wide}:  # no part, but a range
            told = f"joined values do not fit side by side into columns {columns.start}:{columns.stop}"
            raise UnsplitError(wide[columns], f"{told}: {WAY_OUT}")
        parts |= {*wide}


def _spans_beside(parts: Collection[Columns], graph: Graph, problem: Problem, whole: Columns) -> Spans:
    """The same where these equal parts are of all columns."""
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
    """What the arguments of a node are of. What is `read`, of operands and coordinates alone, is of a range where it
    meets a part of one."""
    own = {columns for arg in node.args if not read[arg] for columns in found[arg]} - {whole}
    for arg in node.args:
        for columns in found[arg]:
            within = read[arg] and any(o.start <= columns.start and columns.stop <= o.stop for o in own)
            if not within or columns in own:
                yield columns


def _widths(graph: Graph, problem: Problem) -> list[int]:
    """How wide equal parts of all columns may be, each of which every factor counts along, within or beyond."""
    n, factors = problem.extents["n"], {f for type_ in graph.types.values() for f in type_.factors if f.axis == "n"}
    ends = [(factor.stride, factor.stride * factor.size(problem.extents)) for factor in factors]
    some = {width for i in range(1, isqrt(n) + 1) if n % i == 0 for width in (i, n // i)}
    return [
        width
        for width in sorted(some)
        if all(not (step % width and width % end and (width % step or end % width)) for step, end in ends)
    ]


def _fits(node: Node, columns: Columns, graph: Graph, whole: Columns) -> bool:
    """Whether the columns of a range have room for the places of all values that lie side by side."""
    width = columns.stop - columns.start
    beyond = [
        factor
        for factor in graph.types[node].factors
        if factor.axis == "n" and (factor.extent is None or width % (factor.stride * factor.extent))
    ]
    return columns == whole or not beyond


def _varying(factors: Iterable[Factor], problem: Problem, whole: Columns) -> Iterable[Columns]:
    """What an operand or a coordinate is of."""
    for factor in factors:
        if factor.along == "n" and factor.axis != "n":
            yield Columns(*columns_of(factor.axis, problem.extents))
        elif factor == Factor("n", factor.stride):
            yield whole


def taken_by(node: Node, graph: Graph, problem: Problem) -> Columns | None:
    """The columns that a node takes of all."""
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
        return None  # one of the values that were joined, which are not all columns
    start = sum(factor.stride * place for factor, place in node.attr)
    return Columns(start, start + width)
