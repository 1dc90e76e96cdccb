"""Reductions of a row that need its largest value: both are found in one pass, if no full-size value reads them.

As written, such reductions need the whole row in one cluster. Here they become one reduction, whose partial results are
pairs that are merged online, so that a row may have any length. A pair holds the largest value, and either the sum of
exp(x - largest), as for `logsumexp`, or the place of the largest value, as for `argmax`. Imports no cutlass.
"""

from __future__ import annotations

import math

import torch

from epifuse.ir import Builder, Graph, Node, Type, rewrite
from epifuse.ir.graph import keep
from epifuse.passes.assign_stages import assign_stages, shares_rows
from epifuse.passes.canonicalise import constant, typed
from epifuse.providers.cutedsl.row_constants import move_row_constants_out
from epifuse.request.problem import Problem

EXPONENTIALS, PLACE = "sum_of_exponentials", "place_of_largest"
MOST_PLACES = 2**24
"""The most elements of a row. A place crosses to the second kernel as float32, which is exact up to this number."""
_LAST = 2**31 - 1


def merge_online(graph: Graph, problem: Problem) -> Graph:
    """The graph with each such pair of reductions as one; `graph` itself if some value still needs its whole row.

    `graph` has stages, and the result has them too.
    """
    if not _may_lose_rows(graph):
        return graph
    found = assign_stages(rewrite(graph, _one_reduction), problem)
    return graph if shares_rows(found) else found


def of_wide_rows(graph: Graph, problem: Problem) -> Graph | None:
    """`merge_online` for rows that no cluster holds, after `move_row_constants_out`.

    The result is rounded as the largest terms of those sums are. None if some value still needs its whole row, or if no
    value did before."""
    if not _may_lose_rows(graph):
        return None
    found = merge_online(assign_stages(move_row_constants_out(graph), problem), problem)
    return None if shares_rows(found) else found


def _may_lose_rows(graph: Graph) -> bool:
    """Whether some values need whole rows, but no output does: an output would need its whole row in any form."""
    return shares_rows(graph) and all(graph.stages[root].kind != "row" for root in graph.roots)


def _one_reduction(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
    match old, args:
        case Node("reduce", _, ("sum", gone)), (Node("exp", (Node("sub", (x, largest)),)),) if _is_extreme(
            "amax", largest, x, gone
        ):
            return builder.node("reduce", x, attr=(EXPONENTIALS, gone))
        # From log_softmax: one reduction instead of two takes 0.95 of the time (vocabulary_h200.json). Both forms are
        # rounded as x itself is.
        case Node("sub"), (Node("sub", (y, largest)), Node("log", (total,))) if _is_total(total, largest):
            return builder.node("sub", y, _logsumexp(total, builder))
        case Node("add"), (largest, Node("log", (total,))) if _is_total(total, largest):
            return _logsumexp(total, builder)
        case Node("reduce", _, ("amin", gone)), (
            Node("where", (there, Node("index", _, along), Node("const", _, end))),
        ) if along == gone and len(gone) == 1 and gone[0].extent is None and end == _LAST:
            return _place(there, old, builder) or keep(old, args, builder)
    return keep(old, args, builder)


def _is_total(node: Node, largest: Node) -> bool:
    """Whether the node is the sum of exponentials over `largest`, the largest value of the same row."""
    name, gone = node.attr if node.op == "reduce" else ("", None)
    return name == EXPONENTIALS and _is_extreme("amax", largest, node.args[0], gone)


def _logsumexp(total: Node, builder: Builder) -> Node:
    """The logsumexp of the argument of `total`, a sum of exponentials. NaN if it is infinite, as x - x would be."""
    found = builder.node("reduce", *total.args, attr=("logsumexp", total.attr[1]))
    builder.types.setdefault(found, builder.types[total])
    is_finite = typed(builder, "lt", (typed(builder, "abs", (found,)), constant(math.inf, builder)))
    return typed(builder, "where", (is_finite, found, constant(math.nan, builder)))


def _is_extreme(name: str, node: Node, x: Node, gone: object) -> bool:
    return node.op == "reduce" and node.attr == (name, gone) and node.args == (x,)


def _place(there: Node, old: Node, builder: Builder) -> Node | None:
    """The place of x's first largest or least value, or of its first NaN; None if `there` is no such condition.

    `old` is the reduction of the places. The least value of x is found as the largest value of -x."""
    gone = old.attr[1]
    match there:
        case Node("logical_or", (Node("eq", (x, extreme)), Node("ne", (one, other)))) if one == other == x:
            if extreme.op == x.op == "cast" and extreme.attr == x.attr:  # the second cast changes nothing
                (extreme,) = extreme.args
            if builder.types[x].kind != "float":  # float32 does not hold every int32
                return None
            if _is_extreme("amin", extreme, x, gone):
                x = typed(builder, "neg", (x,))
            elif not _is_extreme("amax", extreme, x, gone):
                return None
            place = builder.node("reduce", x, attr=(PLACE, gone))
            own = builder.types[x].factors
            builder.types.setdefault(place, Type("float", tuple(factor for factor in own if factor not in gone)))
            return builder.node("cast", place, attr=torch.int32)
    return None
