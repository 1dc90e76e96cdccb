"""How exactly each value of an epilogue must be computed, so that every output is as exact as documented.

*full*: a few units in the last place of float32. *narrow*: an error of at most `NARROW_ERROR`, where all that becomes
of the value is at most 16 bits wide. *fast*: the caller asked for `fast_math`. Imports no cutlass: planning asks as
well.
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
"""How many such errors may meet in one output: 16 of them are half of a float16's last place."""
_BOUNDED = ("sigmoid",)
"""Functions up to 1 whose narrow form has an absolute error of 2^-21 at most: in a sum with 1 and more, at most eight
times that of the full form."""


def accuracies(graph: Graph, dtypes: Mapping[str, torch.dtype], *, fast_math: bool = False) -> Mapping[Node, Accuracy]:
    """How exactly to compute each node of a lowered graph whose outputs are stored as `dtypes`, by output name."""
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
"""Floats that are normal numbers, as their reciprocals are."""
_LARGEST = 2.0**128


def _tame_quotients(graph: Graph) -> set[Node]:
    """Divisions by what is far from zero and from the largest float. They need no scaling of both, and are as exact in
    their fast form: of quotients by the scale of a block a thread has as many as values."""
    sizes: dict[Node, tuple[float, float]] = {}
    for node in graph.nodes:
        sizes[node] = _size(node, [sizes[arg] for arg in node.args])
    quotients = [node for node in graph.nodes if node.op == "div"]
    return {node for node in quotients if _TAME[0] <= sizes[node.args[1]][0] and sizes[node.args[1]][1] <= _TAME[1]}


def _size(node: Node, args: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Its magnitude at least and at most, where it is finite, from those of its arguments."""
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
    """How many times an error of each node reaches an output; None where an output or a use is not to be trusted."""
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
    """Nodes of which sums and products make outputs of at most 16 bits, and nothing else is made."""
    found = set(graph.nodes) - {*graph.effects}
    found -= {output.node for output in graph.outputs if not is_narrow_float(dtypes[output.name])}
    for node in reversed(graph.nodes):
        for position, arg in enumerate(node.args):
            if node not in found or not (_carries(node, position) or node.op in _SUMS):
                found.discard(arg)
    return found


def _carries(node: Node, position: int) -> bool:
    """Whether the error of this argument, relative to it, is that of the node."""
    return _error(node) != "amplified" and not (node.op == "where" and position == 0)


_SUMS = ("add", "sub")


def _is_beside_one(node: Node, arg: Node) -> bool:
    """Whether a sum such as 1 - sigmoid(x) takes it: in the slope of silu, s (1 + x (1 - s)), s takes 5 instructions in
    place of 12 then."""
    others = [other.attr for other in node.args if other is not arg and other.op == "const"]
    is_bounded = arg.op == "call" and arg.attr in _BOUNDED
    return node.op in _SUMS and is_bounded and any(isinstance(x, int | float) and abs(x) >= 1 for x in others)


def _error(node: Node) -> Error:
    """What becomes of an error of its arguments: what amplifies it reads what is computed in full."""
    if node.op == "pick":
        return "carried"
    return PRIMITIVES[node.op].error if node.op in PRIMITIVES else "amplified"


def _adds_positive(node: Node) -> bool:
    """A sum that cannot cancel, as softmax has one."""
    return node.op == "reduce" and node.attr[0] in ("sum", "mean") and node.args[0].op in ("exp", "exp2")


def _add(reach: dict[Node, int | None], node: Node, count: int | None) -> None:
    before = reach[node]
    reach[node] = None if before is None or count is None else before + count
