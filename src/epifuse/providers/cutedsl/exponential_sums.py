"""Sums of exp(x - amax(x)), where no value of a tile reads them: what `softmax` divides by, of one chosen column.

As they are written they wait for the largest value of the row, and so for the whole row. A pair of the largest value
and this sum is merged online instead, as for `logsumexp`, so that a row may be of any length. Imports no cutlass.
"""

from __future__ import annotations

from epifuse.ir import Builder, Graph, Node, rewrite
from epifuse.ir.graph import keep
from epifuse.passes.assign_stages import assign_stages, shares_rows
from epifuse.request.problem import Problem

NAME = "sum_of_exponentials"


def online(graph: Graph, problem: Problem) -> Graph:
    """The graph in which these sums are found online, or as it is where some value needs its whole row nevertheless.

    `graph` has its stages, and so has the result.
    """
    if not shares_rows(graph):
        return graph
    found = assign_stages(rewrite(graph, _one_reduction), problem)
    return graph if shares_rows(found) else found


def _one_reduction(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
    match old, args:
        case Node("reduce", _, ("sum", gone)), (Node("exp", (Node("sub", (x, largest)),)),) if (
            largest.op == "reduce" and largest.attr == ("amax", gone) and largest.args == (x,)
        ):
            return builder.node("reduce", x, attr=(NAME, gone))
    return keep(old, args, builder)
