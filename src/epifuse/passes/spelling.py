"""Reductions as a user would write them, for messages."""

from __future__ import annotations

from epifuse.ir import Node
from epifuse.request.problem import Problem


def reductions_under(node: Node) -> tuple[Node, ...]:
    """The reductions that a finished value is computed from, without the reductions below those."""
    found: dict[Node, None] = {}
    stack = [node]
    while stack:
        at = stack.pop()
        if at.op == "reduce":
            found[at] = None
        else:
            stack.extend(at.args)
    return tuple(found)


def spelled(node: Node, problem: Problem) -> tuple[str, str]:
    """Name and dims of a reduction as text: ("norm", "") over all dims, ("sum", ", dim=-1") along rows."""
    name, gone = node.attr
    axes = "lmn" if problem.batched else "mn"
    dims = [axes.index(axis) - len(axes) for axis in sorted({factor.axis for factor in gone} & set(axes))]
    if len(dims) == len(axes):
        return name, ""
    return name, f", dim={dims[0] if len(dims) == 1 else tuple(dims)}"
