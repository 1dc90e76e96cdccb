"""Launching: numbers read again, host expressions evaluated, operands bound, then the runner's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from epifuse.arguments import GemmArguments, is_written_again, old_contents
from epifuse.errors import EpifuseError, Loc, fail
from epifuse.fusion import host
from epifuse.ir import Graph, Kind, Load, Node
from epifuse.ir.types import shape_of
from epifuse.memory import empty
from epifuse.plan import Plan
from epifuse.problem import HostNumber, Problem
from epifuse.providers import Runner, Step

_RANGES = {"int32": range(-(1 << 31), 1 << 31), "int64": range(-(1 << 63), 1 << 63)}


def scalars(args: GemmArguments) -> dict[str, Any]:
    """Every number the kernel reads: operands, captured numbers, and expressions of them, in their kind's type."""
    return _numbers(args.graph, _kinds(args.graph, args.problem), args.numbers)


def _kinds(graph: Graph, problem: Problem) -> dict[str, Kind]:
    kinds = {name: operand.kind for name, operand in problem.operands if isinstance(operand, HostNumber)}
    for node in graph.loads():
        assert isinstance(node.attr, Load)
        if node.attr.name in graph.hosts:
            kinds[node.attr.name] = graph.types[node].kind
    return kinds


def _numbers(graph: Graph, kinds: Mapping[str, Kind], given: Mapping[str, Any]) -> dict[str, Any]:
    values = {**given, **_computed(graph, given)} if graph.hosts else given
    numbers = {}
    for name, kind in kinds.items():
        try:
            numbers[name] = _converted(values[name], kind)
        except OverflowError:
            value = values[name]
            shown = value if value.bit_length() < 128 else f"an integer of {value.bit_length()} bits"
            if name not in graph.hosts:
                raise fail("host_number", None, name=name, value=shown) from None
            raise fail("host_range", graph.loc(graph.hosts[name]), kind=kind, value=shown) from None
    return numbers


def _computed(graph: Graph, given: Mapping[str, Any]) -> dict[str, Any]:
    def leaf(node: Node) -> Any:
        assert isinstance(node.attr, Load)
        return given[node.attr.name]

    try:
        return host.evaluate_all(graph.hosts, leaf)
    except host.HostError as error:
        raise fail("host_arithmetic", graph.loc(error.node), detail=str(error)) from None


def _converted(value: Any, kind: str) -> Any:
    if kind == "mask":
        return bool(value)
    if kind == "float":
        return float(value)
    if value not in _RANGES[kind]:
        raise OverflowError
    return int(value)


@dataclass(frozen=True, eq=False)
class Recipe:
    """All that launching needs and that neither addresses nor numbers change: one serves every call of a geometry.

    `outputs` are names, shapes and dtypes in the order of the return statement.
    """

    plan: Plan
    runner: Runner
    kinds: Mapping[str, Kind]
    outputs: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]

    @staticmethod
    def of(plan: Plan, runner: Runner) -> Recipe:
        """The recipe of a plan that was built as `runner`."""
        graph, problem = plan.graph, plan.problem
        dtypes = dict(problem.dtypes)
        outputs = tuple(
            (output.name, shape_of(output.dims or (), problem.extents), dtypes[output.name]) for output in graph.outputs
        )
        return Recipe(plan, runner, _kinds(graph, problem), outputs)

    def destinations(self, given: Mapping[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
        """The outputs by name: those given, and new ones for the others."""
        return {
            name: empty(shape, dtype, device) if (tensor := given.get(name)) is None else tensor
            for name, shape, dtype in self.outputs
        }

    def bind(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        tensors: Mapping[str, Any],
        numbers: Mapping[str, Any],
        outputs: Mapping[str, torch.Tensor],
    ) -> Step:
        """A function that only launches."""
        operands = {**tensors, **_numbers(self.plan.graph, self.kinds, numbers)} if self.kinds else tensors
        if not self.plan.problem.accumulated:
            return _explained(self.runner(a, b, operands, outputs), self.plan)
        graph, problem = self.plan.graph, self.plan.problem

        def onto_old() -> Step:
            return self.runner(a, b, {**operands, **old_contents(graph, problem, outputs)}, outputs)

        if any(is_written_again(o, graph, problem) for o in graph.outputs if o.name in dict(problem.accumulated)):
            return _explained(lambda: onto_old()(), self.plan)  # each launch copies what it is to be added onto
        return _explained(onto_old(), self.plan)


def require_data(named: Iterable[tuple[str, Any]]) -> None:
    """Raise `ArgumentError` for a tensor that only describes one."""
    for name, value in named:
        if isinstance(value, torch.Tensor) and (value.is_meta or type(value).__name__ == "FakeTensor"):
            raise fail("no_data", None, name=name)


def bind(recipe: Recipe, args: GemmArguments, outputs: Mapping[str, torch.Tensor]) -> Step:
    """A function that only launches: operands bound, numbers fixed. Raises `ArgumentError` for tensors without data."""
    require_data((("A", args.A), ("B", args.B), *args.epilogue.tensors.items(), *outputs.items()))
    return recipe.bind(args.A, args.B, args.epilogue.tensors, args.numbers, outputs)


def _explained(step: Step, plan: Plan) -> Callable[[], None]:
    """`step`, whose errors are ours; memory that is lacking stays torch's own error."""

    def run() -> None:
        try:
            step()
        except (EpifuseError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            # torch's own text for // and % of integers by zero, found while the CPU computes a panel.
            if "ZeroDivisionError" in str(error):
                raise fail("integer_division", _division(plan.graph)) from None
            raise fail("launch", None, kernel=plan.spec.name, detail=error, plan=plan) from error

    return run


def _division(graph: Graph) -> Loc | None:
    """The place of the integer division that was by zero, where there is only one it can be."""
    divisions = [node for node in graph.nodes if node.op in ("floor_divide", "remainder")]
    places = {graph.loc(node) for node in divisions if node.args[1].op != "const"}
    return places.pop() if len(places) == 1 else None
