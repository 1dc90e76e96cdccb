"""The transposed product: D.T = B.T @ A.T, whose tiles may have any multiple of 8 rows of the result.

One multiplication of a warp group has at least 64 rows, and any multiple of 8 columns. If A has few rows, or a few more
than a multiple of 64, much of its part of a tile would be zeros. So A and B are exchanged, and M and N with them, in
the problem and in the graph. All later steps, from accesses to the kernel, see a product like any other. Operands and
outputs stay in place in memory: their dims say which axes they run along. Imports no cutlass.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from epifuse.ir import Factor, Graph, Load, Node
from epifuse.ir.types import canonical
from epifuse.passes.assign_stages import has_row_stage
from epifuse.plan import Reason
from epifuse.request.problem import Problem, TensorInfo

MOST_ROWS = 128
"""The most rows of A for which tiles of 64 columns of the result are used."""
_MOST_BESIDE_8_BITS = 256
"""The same for an A of 16 bits and a weight of 8 bits. Without an exchange a first kernel would read the weight and
write twice its bytes, which takes longer than reading the weight once for each 64 rows."""

LEAST_ROWS = 257
"""The fewest rows of A for which tiles of 128 columns are used. Up to 256 rows, tiles of 64 or 128 rows are mostly
full, and with 129 rows a single row of tiles would leave three quarters of the multiprocessors idle."""

_OTHER = {"m": "n", "n": "m"}


def problem_of(problem: Problem) -> Problem:
    """The problem with A and B exchanged. Constraints are not exchanged: they stay those of the result."""
    return problem._replace(a=_transposed(problem.b), b=_transposed(problem.a))


def _transposed(info: TensorInfo) -> TensorInfo:
    shape, strides = info.shape, info.strides
    return info._replace(shape=(*shape[:-2], shape[-1], shape[-2]), strides=(*strides[:-2], strides[-1], strides[-2]))


def graph_of(graph: Graph) -> Graph:
    """A graph, as the kernel walks it, with M and N exchanged everywhere."""
    new: dict[Node, Node] = {}
    for node in graph.nodes:
        new[node] = Node(node.op, tuple(new[arg] for arg in node.args), _exchanged(node.attr))
    types = {
        new[node]: replace(graph.types[node], factors=canonical(map(_exchanged, graph.types[node].factors)))
        for node in graph.nodes
    }

    def renamed(values: Mapping[Node, Any]) -> dict[Node, Any]:
        return {new[node]: values[node] for node in graph.nodes if node in values}

    outputs = [
        output._replace(node=new[output.node], dims=_exchanged(output.dims), whole=_exchanged(output.whole))
        for output in graph.outputs
    ]
    return replace(
        graph, outputs=tuple(outputs), types=types, stages=renamed(graph.stages), locs=renamed(graph.locs), checked=()
    )


def _exchanged(attr: Any) -> Any:
    """An attribute of a node, or a part of one, with M and N exchanged."""
    if isinstance(attr, Factor):
        return attr._replace(axis=_OTHER.get(attr.axis, attr.axis))
    if isinstance(attr, Load):
        return attr._replace(dims=_exchanged(attr.dims))
    return tuple(map(_exchanged, attr)) if isinstance(attr, tuple) else attr


def most_rows(problem: Problem) -> int:
    """The most rows of A for which tiles of 64 columns are used in this problem."""
    return MOST_ROWS if problem.a.dtype.itemsize == problem.b.dtype.itemsize else _MOST_BESIDE_8_BITS


def unfit(problem: Problem, *, few: bool) -> str | None:
    """Why designs for `few` rows, or those for more rows, are not used for a problem, or None."""
    rows, most = problem.extents["m"], most_rows(problem)
    if few:
        return f"it is for up to {most} rows, with A and B exchanged, and M is {rows}" if rows > most else None
    if (reason := _unfit_for_many(problem)) is not None or rows >= LEAST_ROWS:
        return reason
    return f"it is for {LEAST_ROWS} rows and more, with A and B exchanged, and M is {rows}"


def rows_taken(problem: Problem, *, few: bool) -> range:
    """The values of M for which designs for `few` rows, or those for more rows, are used."""
    if few:
        return range(1, most_rows(problem) + 1)
    return range(0) if _unfit_for_many(problem) else range(LEAST_ROWS, sys.maxsize)


def _unfit_for_many(problem: Problem) -> str | None:
    if {problem.a.dtype.itemsize, problem.b.dtype.itemsize} != {2}:
        return "it is for A and B of 16 bits"
    if problem.a.strides[-1] != 1:
        return "it is for A by rows: a swizzle of columns has 64 of them, and its tiles another number of rows"
    return None


def still_unfit(rows: int) -> tuple[float, ...] | None:
    """`Answers.of_rows` of designs for many rows that are refused for too few: no costs while `rows` are still too few;
    None with more, when the answer may change."""
    return () if rows < LEAST_ROWS else None


def refused(graph: Graph, *, in_parts: bool) -> Reason | None:
    """Why a graph is not computed with A and B exchanged, or None. `in_parts`: its columns are those of one of the two
    parts of a row (`weave.py`)."""
    if graph.effects:
        return Reason(f"{_UNSUPPORTED} debug_print{_OTHERS_SUPPORT_IT}", graph.loc(graph.effects[0]))
    for node in graph.nodes:
        if in_parts or node.op == "pick":
            return Reason(f"{_UNSUPPORTED} parts of a row{_OTHERS_SUPPORT_IT}", graph.loc(node))
    if has_row_stage(graph):
        node = next(node for node in graph.nodes if graph.stages[node].kind == "row")
        why = f"{_UNSUPPORTED} a value that needs its whole row or a segment of it{_OTHERS_SUPPORT_IT}"
        return Reason(why, graph.loc(node))
    return None


_UNSUPPORTED = "a design that exchanges A and B does not support"
_OTHERS_SUPPORT_IT = ": other designs do not have this limit"
