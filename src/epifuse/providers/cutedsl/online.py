"""Reductions of a row that wait for its largest value: found in one pass with it, where no value of a tile reads them.

As they are written they take the whole row in one cluster. A pair is merged online instead, so that a row may be of any
length: the largest value with the sum of exp(x - largest), which `softmax` divides by, as for `logsumexp`; or with its
place, as `argmax` gives it. Imports no cutlass.
"""

from __future__ import annotations

import math

import torch

from epifuse.ir import Builder, Graph, Node, Type, rewrite
from epifuse.ir.graph import keep
from epifuse.passes.assign_stages import assign_stages, shares_rows
from epifuse.passes.canonicalise import constant, typed
from epifuse.providers.cutedsl.row_constants import apart
from epifuse.request.problem import Problem

EXPONENTIALS, PLACE = "sum_of_exponentials", "place_of_largest"
MOST_PLACES = 2**24
"""Beyond these a place is no exact float32, as which it crosses to the second kernel."""
_LAST = 2**31 - 1


def online(graph: Graph, problem: Problem) -> Graph:
    """The graph in which these are one reduction each, or as it is where some value needs its whole row nevertheless.

    `graph` has its stages, and so has the result.
    """
    if not _may_lose_rows(graph):
        return graph
    found = assign_stages(rewrite(graph, _one_reduction), problem)
    return graph if shares_rows(found) else found


def of_wide_rows(graph: Graph, problem: Problem) -> Graph | None:
    """The same where no tile holds a row: what leaves its sums there is rounded as their largest terms are. None where
    some value needs its whole row nevertheless, or none does anyway."""
    if not _may_lose_rows(graph):
        return None
    found = online(assign_stages(apart(graph), problem), problem)
    return None if shares_rows(found) else found


def _may_lose_rows(graph: Graph) -> bool:
    """Whether values need whole rows, and none of them is stored: that one would need its row in any form."""
    return shares_rows(graph) and all(graph.stages[root].kind != "row" for root in graph.roots)


def _one_reduction(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
    match old, args:
        case Node("reduce", _, ("sum", gone)), (Node("exp", (Node("sub", (x, largest)),)),) if _is_extreme(
            "amax", largest, x, gone
        ):
            return builder.node("reduce", x, attr=(EXPONENTIALS, gone))
        # Of log_softmax: one reduction in place of two takes 0.95 of the time (vocabulary_h200.json). Both are rounded
        # as x is itself.
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
    """Whether it is the sum of exponentials beside this largest value."""
    name, gone = node.attr if node.op == "reduce" else ("", None)
    return name == EXPONENTIALS and _is_extreme("amax", largest, node.args[0], gone)


def _logsumexp(total: Node, builder: Builder) -> Node:
    """Of what the sum of exponentials is of; NaN where it is infinite, as x - x is there."""
    found = builder.node("reduce", *total.args, attr=("logsumexp", total.attr[1]))
    builder.types.setdefault(found, builder.types[total])
    is_finite = typed(builder, "lt", (typed(builder, "abs", (found,)), constant(math.inf, builder)))
    return typed(builder, "where", (is_finite, found, constant(math.nan, builder)))


def _is_extreme(name: str, node: Node, x: Node, gone: object) -> bool:
    return node.op == "reduce" and node.attr == (name, gone) and node.args == (x,)


def _place(there: Node, old: Node, builder: Builder) -> Node | None:
    """The first place where x is its largest or least value, or NaN; of the least value it is the largest of -x."""
    gone = old.attr[1]
    match there:
        case Node("logical_or", (Node("eq", (x, extreme)), Node("ne", (one, other)))) if one == other == x:
            if extreme.op == x.op == "cast" and extreme.attr == x.attr:  # the largest of rounded values is one of them
                (extreme,) = extreme.args
            if builder.types[x].kind != "float":  # an integer of 32 bits is no float32
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
