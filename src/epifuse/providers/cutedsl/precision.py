"""How exactly each value of an epilogue must be computed, so that every output is as exact as documented.

*full*: a few units in the last place of float32. *narrow*: a relative error of at most `NARROW_ERROR`, for values that
only reach outputs of at most 16 bits. *fast*: the caller asked for `fast_math`, or the fast form of a division is as
exact. Imports no cutlass, because planning uses this module as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from epifuse.base.dtypes import is_narrow_float
from epifuse.fusion.primitives import PRIMITIVES, Error
from epifuse.ir import Graph, Node

Accuracy = Literal["full", "narrow", "fast"]

NARROW_ERROR = 2.0**-16
"""Largest relative error of a narrow form wherever its result is a normal number of the output's dtype."""
_BUDGET = 16
"""How many errors of `NARROW_ERROR` one output may collect: 16 of them are half a unit in float16's last place."""
_BOUNDED = ("sigmoid",)
"""Functions of at most 1 whose narrow form has an absolute error of 2^-21 at most. In a sum with a constant of at least
1 that is at most eight times the error of the full form."""


def accuracies(graph: Graph, dtypes: Mapping[str, torch.dtype], *, fast_math: bool = False) -> Mapping[Node, Accuracy]:
    """How exactly to compute each node of a lowered graph. `dtypes` are those that outputs are stored as, by name."""
    if fast_math:
        return dict.fromkeys(graph.nodes, "fast")
    errors = _reach(graph, dtypes)
    narrow = {node for node, count in errors.items() if count is not None}
    approximated = (errors[node] or 0 for node in narrow if node.args and _error(node) != "carried")
    if sum(approximated) > _BUDGET:
        return dict.fromkeys(graph.nodes, "full")
    tame = _tame_quotients(graph)
    return {node: ("fast" if node in tame else "narrow") if node in narrow else "full" for node in graph.nodes}


_TAME = 2.0**-126, 2.0**126
"""The range of floats that are normal numbers and whose reciprocals are normal numbers too."""
_LARGEST = 2.0**128


def _tame_quotients(graph: Graph) -> set[Node]:
    """Divisions whose divisor is far from zero and from the largest float.

    They need no scaling of both operands, so their fast form is as exact. If values are divided by the scale of a
    block, a thread has one such division for each of its values."""
    sizes: dict[Node, tuple[float, float]] = {}
    for node in graph.nodes:
        sizes[node] = _size(node, [sizes[arg] for arg in node.args])
    quotients = [node for node in graph.nodes if node.op == "div"]
    return {node for node in quotients if _TAME[0] <= sizes[node.args[1]][0] and sizes[node.args[1]][1] <= _TAME[1]}


def _size(node: Node, args: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The least and the largest magnitude of the node if it is finite. `args` are those of its arguments."""
    if node.op == "const" and isinstance(node.attr, float | int):
        return abs(node.attr), abs(node.attr)
    if node.op == "where":
        return min(args[1][0], args[2][0]), max(args[1][1], args[2][1])
    if node.op == "maximum":
        least = [arg.attr for arg in node.args if arg.op == "const"]
        return max((0.0, *least)), max(args[0][1], args[1][1])
    if node.op == "mul":
        return 0.0, args[0][1] * args[1][1]
    if node.op == "div" and args[1][0]:
        return 0.0, args[0][1] / args[1][0]
    return 0.0, args[0][1] if node.attr == "floor_power_of_two" else _LARGEST


def _reach(graph: Graph, dtypes: Mapping[str, torch.dtype]) -> Mapping[Node, int | None]:
    """How many times an error of each node reaches an output. None if an output is wide, or if some use of the node
    amplifies its error."""
    reach: dict[Node, int | None] = dict.fromkeys(graph.nodes, 0)
    added_up = _added_up(graph, dtypes)
    for effect in graph.effects:
        reach[effect] = None
    for output in graph.outputs:
        _add(reach, output.node, 1 if is_narrow_float(dtypes[output.name]) else None)
    for node in reversed(graph.nodes):
        for position, arg in enumerate(node.args):
            if node in added_up and _is_beside_one(node, arg):
                _add(reach, arg, 1)
            else:
                _add(reach, arg, reach[node] if _carries(node, position) or _adds_positive(node) else None)
    return reach


def _added_up(graph: Graph, dtypes: Mapping[str, torch.dtype]) -> set[Node]:
    """Nodes whose only uses, down to outputs of at most 16 bits, are sums and operations that carry an error on."""
    found = set(graph.nodes) - {*graph.effects}
    found -= {output.node for output in graph.outputs if not is_narrow_float(dtypes[output.name])}
    for node in reversed(graph.nodes):
        for position, arg in enumerate(node.args):
            if node not in found or not (_carries(node, position) or node.op in _SUMS):
                found.discard(arg)
    return found


def _carries(node: Node, position: int) -> bool:
    """Whether a relative error of this argument is at most carried on to the node's value, and not amplified."""
    return _error(node) != "amplified" and not (node.op == "where" and position == 0)


_SUMS = ("add", "sub")


def _is_beside_one(node: Node, arg: Node) -> bool:
    """Whether `node` is a sum of `arg` and a constant of at least 1, such as 1 - sigmoid(x).

    So s takes 5 instructions instead of 12 in the slope of silu, s (1 + x (1 - s))."""
    others = [other.attr for other in node.args if other is not arg and other.op == "const"]
    is_bounded = arg.op == "call" and arg.attr in _BOUNDED
    return node.op in _SUMS and is_bounded and any(isinstance(x, int | float) and abs(x) >= 1 for x in others)


def _error(node: Node) -> Error:
    """What the node does with an error of its arguments. If it amplifies the error, they are computed in full."""
    if node.op == "pick":
        return "carried"
    return PRIMITIVES[node.op].error if node.op in PRIMITIVES else "amplified"


def _adds_positive(node: Node) -> bool:
    """Whether the node is a sum or mean of exponentials, as in softmax. Its terms cannot cancel."""
    return node.op == "reduce" and node.attr[0] in ("sum", "mean") and node.args[0].op in ("exp", "exp2")


def _add(reach: dict[Node, int | None], node: Node, count: int | None) -> None:
    before = reach[node]
    reach[node] = None if before is None or count is None else before + count
