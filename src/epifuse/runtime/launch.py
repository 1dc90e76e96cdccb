"""Launching: numbers read again, host expressions evaluated, then the runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from epifuse.arguments import GemmArguments
from epifuse.errors import fail
from epifuse.fusion import host
from epifuse.ir import Load, Node
from epifuse.problem import HostNumber
from epifuse.providers import Runner

_INT32 = range(-(1 << 31), 1 << 31)


def scalars(args: GemmArguments) -> dict[str, Any]:
    """Every number the kernel reads: operands, captured numbers, and expressions of them, in their kind's type."""
    values = dict(args.numbers)

    def leaf(node: Node) -> Any:
        assert isinstance(node.attr, Load)
        return values[node.attr.name]

    try:
        computed = host.evaluate_all(args.graph.hosts, leaf)
    except host.HostError as error:
        raise fail("host_arithmetic", args.graph.loc(error.node), detail=str(error)) from None
    kinds = {name: operand.kind for name, operand in args.problem.operands if isinstance(operand, HostNumber)}
    for node in args.graph.loads():
        assert isinstance(node.attr, Load)
        if node.attr.name in computed:
            kinds[node.attr.name] = args.graph.types[node].kind
    numbers = {name: value for name, value in (values | computed).items() if name in kinds}
    for name, value in numbers.items():
        try:
            numbers[name] = _converted(value, kinds[name])
        except OverflowError:
            shown = value if value.bit_length() < 128 else f"an integer of {value.bit_length()} bits"
            if name not in args.graph.hosts:
                raise fail("host_number", None, name=name, value=shown) from None
            loc = args.graph.loc(args.graph.hosts[name])
            raise fail("host_range", loc, kind=kinds[name], value=shown) from None
    return numbers


def _converted(value: Any, kind: str) -> Any:
    if kind == "mask":
        return bool(value)
    if kind == "float":
        return float(value)
    if value not in _INT32:
        raise OverflowError
    return int(value)


def launch(runner: Runner, args: GemmArguments, outputs: Mapping[str, torch.Tensor]) -> None:
    """Run once. Raises `ArgumentError` for tensors that have no data, before anything is written."""
    prepare(runner, args, outputs)()


def prepare(runner: Runner, args: GemmArguments, outputs: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    """A function that only launches: operands bound, numbers fixed."""
    operands: dict[str, Any] = {**args.epilogue.tensors, **scalars(args)}
    tensors = {"A": args.A, "B": args.B, **operands, **outputs}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and (tensor.is_meta or _is_fake(tensor)):
            raise fail("no_data", None, name=name)

    step = runner(args.A, args.B, operands, outputs)

    def run() -> None:
        try:
            step()
        except RuntimeError as error:
            # torch's own text for // and % of integers by zero, found while the CPU computes a panel.
            if "ZeroDivisionError" not in str(error):
                raise
            raise fail("integer_division", None) from None

    return run


def _is_fake(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "FakeTensor"
