"""Integers that fit what they are used as, where PyTorch traces a call: they raise there, as a launch would.

A tensor without dims is not looked at. Its value is known where the graph runs, and wraps as it does in PyTorch.
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
    """Raise `EpifuseError` for an integer that does not fit, of what the host hands to a typed graph."""
    kinds = {name: kind for name, kind in kinds_of(graph, problem).items() if kind in RANGES and name in graph.hosts}
    for name, value in host_numbers(graph, accum, given).items() if kinds else ():
        if name in kinds and not isinstance(value, torch.Tensor):
            _check(graph, name, kinds[name], value)


def _check(graph: Graph, name: str, kind: str, value: Any) -> None:
    """Raise for a number. A symbol is guarded by what it is compared with, or asserted where no example is known."""
    symbolic = isinstance(value, torch.SymInt)
    if symbolic and kind == "int64":
        return
    low, high = RANGES[kind][0], RANGES[kind][-1]
    if symbolic and value.node.hint is None:
        torch._check(value >= low)  # type: ignore[no-untyped-call]  # untyped; it tells in words of its own
        torch._check(value <= high)  # type: ignore[no-untyped-call]  # untyped
    elif not low <= value <= high:
        raise unfit(spelled(graph, name), kind, int(value), graph.loc(graph.hosts[name]))
