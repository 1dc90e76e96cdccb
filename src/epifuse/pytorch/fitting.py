"""The check that integers fit the kinds they are used as, while PyTorch traces a call. It raises as a launch does.

A tensor without dims is not checked. Its value is known only when the graph runs, and wraps as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from epifuse.ir import Graph
from epifuse.pytorch.interpret import host_numbers
from epifuse.request.problem import Problem
from epifuse.runtime.numbers import RANGES, kinds_of, spelled, unfit


def check_integers(graph: Graph, problem: Problem, accum: torch.Tensor, given: Mapping[str, Any]) -> None:
    """Raise `EpifuseError` if an integer that the host hands to a typed graph does not fit its kind."""
    kinds = {name: kind for name, kind in kinds_of(graph, problem).items() if kind in RANGES and name in graph.hosts}
    for name, value in host_numbers(graph, accum, given).items() if kinds else ():
        if name in kinds and not isinstance(value, torch.Tensor):
            _check_number(graph, name, kinds[name], value)


def _check_number(graph: Graph, name: str, kind: str, value: Any) -> None:
    """Raise if `value` does not fit. Comparing a symbol guards it; a symbol without a known example is asserted."""
    symbolic = isinstance(value, torch.SymInt)
    if symbolic and kind == "int64":
        return
    low, high = RANGES[kind][0], RANGES[kind][-1]
    if symbolic and value.node.hint is None:
        torch._check(value >= low)  # type: ignore[no-untyped-call]  # untyped; it tells in words of its own
        torch._check(value <= high)  # type: ignore[no-untyped-call]  # untyped
    elif not low <= value <= high:
        raise unfit(spelled(graph, name), kind, int(value), graph.loc(graph.hosts[name]))
