"""How exactly each value of an epilogue must be computed, so that every output is as exact as documented.

*full*: a few units in the last place of float32. *narrow*: an error of at most `NARROW_ERROR`, where all that becomes
of the value is at most 16 bits wide. *fast*: the caller asked for `fast_math`. Imports no cutlass: planning asks as
well.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def accuracies(graph: Graph, dtypes: Mapping[str, torch.dtype], *, fast_math: bool = False) -> Mapping[Node, Accuracy]:
    """How exactly to compute each node of a lowered graph whose outputs are stored as `dtypes`, by output name."""
    if fast_math:
        return dict.fromkeys(graph.nodes, "fast")
    errors = _reach(graph, dtypes)
    narrow = {node for node, count in errors.items() if count is not None}
    approximated = (errors[node] or 0 for node in narrow if node.args and _error(node) != "carried")
    if sum(approximated) > _BUDGET:
        return dict.fromkeys(graph.nodes, "full")
    return {node: "narrow" if node in narrow else "full" for node in graph.nodes}


def _reach(graph: Graph, dtypes: Mapping[str, torch.dtype]) -> Mapping[Node, int | None]:
    """How many times an error of each node reaches an output; None where an output or a use is not to be trusted."""
    reach: dict[Node, int | None] = dict.fromkeys(graph.nodes, 0)
    for effect in graph.effects:
        reach[effect] = None
    for output in graph.outputs:
        _add(reach, output.node, 1 if is_narrow_float(dtypes[output.name]) else None)
    for node in reversed(graph.nodes):
        for position, arg in enumerate(node.args):
            carried = _error(node) != "amplified" and not (node.op == "where" and position == 0)
            carried = carried or _adds_positive(node)
            _add(reach, arg, reach[node] if carried else None)
    return reach


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
