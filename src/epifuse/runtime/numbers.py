"""The numbers that a kernel reads: operands that are numbers, captured numbers, and host expressions of these, each
converted to the type of the kernel's argument."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from epifuse.base.errors import EpifuseError, Loc, fail
from epifuse.fusion import host
from epifuse.ir import Graph, Kind, Load, Node
from epifuse.ir.graph import sides
from epifuse.request.problem import HostNumber, Problem

RANGES = {"int32": range(-(1 << 31), 1 << 31), "int64": range(-(1 << 63), 1 << 63)}
"""The range of integers that each kind can hold."""
_LARGEST = torch.finfo(torch.float32).max


def scalars(graph: Graph, problem: Problem, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Every number that the kernel reads, by name, as the type of its kind. `numbers` are those handed over."""
    return numbers_of(graph, problem, kinds_of(graph, problem), numbers)


def kinds_of(graph: Graph, problem: Problem) -> dict[str, Kind]:
    """The kind of every number that the kernel reads, by name."""
    # The graph loads a Python integer under other names, one for each kind as which it is used.
    kinds: dict[str, Kind] = {
        name: operand.kind
        for name, operand in problem.operands
        if isinstance(operand, HostNumber) and operand.kind != "int"
    }
    for node in graph.loads() if graph.hosts else ():
        assert isinstance(node.attr, Load)
        if node.attr.name in graph.hosts:
            kinds[node.attr.name] = graph.types[node].kind
    return kinds


def numbers_of(graph: Graph, problem: Problem, kinds: Mapping[str, Kind], given: Mapping[str, Any]) -> dict[str, Any]:
    """Every number that the kernel reads, by name. `kinds` are their kinds, `given` the numbers that were handed over.
    Raises `EpifuseError`."""
    values = {**given, **_computed(graph, problem, given)} if graph.hosts else given
    numbers, largest = {}, math.inf if problem.accumulator is torch.float64 else _LARGEST
    for name, kind in kinds.items():
        try:
            numbers[name] = _converted(values[name], kind, largest)
        except OverflowError:
            raise unfit(spelled(graph, name), kind, values[name], graph.loc(graph.hosts[name])) from None
    return numbers


def spelled(graph: Graph, name: str) -> str:
    """The name by which a number was handed over or captured; the empty string if the host computes it from others."""
    root = graph.hosts[name]
    return root.attr.name.removeprefix("@") if isinstance(root.attr, Load) else ""


def unfit(name: str, kind: str, value: Any, loc: Loc | None = None) -> EpifuseError:
    """The error for an integer that is too large for its kind. If it has 128 bits or more, only its size is shown."""
    large = isinstance(value, int) and value.bit_length() >= 128
    shown = f"an integer of {value.bit_length()} bits" if large else value
    if not name:
        return fail("host_range", loc, kind=kind, value=shown)
    return fail("host_number", loc, name=name, kind=kind, value=shown, hint=_WIDER if kind == "int32" else "")


_WIDER = "write x.to(torch.int64) for what it stands beside, or hand it over as a float"


def _computed(graph: Graph, problem: Problem, given: Mapping[str, Any]) -> dict[str, Any]:
    def leaf(node: Node) -> Any:
        if node.op == "axis":
            return problem.extents[node.attr]
        assert isinstance(node.attr, Load)
        return given[node.attr.name]

    try:
        # Most numbers are used as they were handed over and need no evaluation.
        plain = {name: leaf(root) for name, root in graph.hosts.items() if root.op == "load"}
        computed = {name: root for name, root in graph.hosts.items() if root.op != "load"}
        return plain | host.evaluate_all(computed, leaf) if computed else plain
    except host.HostError as error:
        return plain | _one_by_one(graph, computed, leaf, error)


def _one_by_one(
    graph: Graph, computed: Mapping[str, Node], leaf: Callable[[Node], Any], first: host.HostError
) -> dict[str, Any]:
    """The computed numbers, where some cannot be computed.

    Such a number is 0 if it is only used in the side of a conditional that is not taken, because its value does not
    matter there. For any other number an error with the text of `first` is raised.
    """
    found: dict[str, Any] = {}
    for name, root in computed.items():
        with suppress(host.HostError):
            found[name] = host.evaluate(root, leaf)
    conditions = {**{name: leaf(root) for name, root in graph.hosts.items() if root.op == "load"}, **found}
    spared: set[str] = set()
    for side in sides(graph, lambda node: node.op == "load" and node.attr.name in conditions):
        if bool(conditions[side.condition.attr.name]) is not side.is_first:
            spared |= {node.attr.name for node in side.nodes if node.op == "load"}
    if not {*computed} - {*found} <= spared:
        raise fail("host_arithmetic", graph.loc(first.node), detail=str(first)) from None
    return {name: found.get(name, 0) for name in computed}


def _converted(value: Any, kind: str, largest: float) -> Any:
    if kind == "mask":
        return bool(value)
    if kind == "float":
        number = float(value)
        return number if -largest <= number <= largest else ctypes.c_float(number).value  # infinite, as for a literal
    if value not in RANGES[kind]:
        raise OverflowError
    return int(value)
