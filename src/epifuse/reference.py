"""The meaning of an epilogue, run by PyTorch: the user's own function, or the graph one full-size value at a time."""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from epifuse.arguments import GemmArguments
from epifuse.fusion.forms import debug_print
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.reduction import REDUCTIONS
from epifuse.fusion.vocabulary import BUILTINS, VOCABULARY
from epifuse.ir import Graph, Load, Node
from epifuse.ir.types import dim_size, shape_of
from epifuse.passes.lower import lower
from epifuse.providers.cpu.space import Space, viewed
from epifuse.providers.cpu.store import store
from epifuse.runtime.launch import scalars


def reference(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the builtins max, min, sum, abs, round, any, all and pow rebound to the vocabulary.

    Called as `reference(fn)(accum, **operands)` with float32 tensors, it is what the fused epilogue computes, before
    outputs are stored. Helpers the function calls are rebound too. The function itself is not changed.
    """
    rebound: Callable[..., Any] = _rebound(getattr(function, "__epifuse_function__", function), {})
    return rebound


_REBOUND = {name: VOCABULARY[name].function for name in BUILTINS.values()}


def _rebound(function: Any, done: dict[int, Any]) -> Any:
    if not isinstance(function, types.FunctionType) or function.__module__.split(".")[0] in ("torch", "epifuse"):
        return function
    if id(function) in done:
        return done[id(function)]
    namespace: dict[str, Any] = dict(function.__globals__)
    made = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, _cells(function, done)
    )
    made.__kwdefaults__ = function.__kwdefaults__
    done[id(function)] = functools.wraps(function)(made)
    for name in function.__code__.co_names:
        value = namespace.get(name, getattr(builtins, name, None))
        if name in _REBOUND and value is getattr(builtins, name):
            namespace[name] = _REBOUND[name]
        elif isinstance(value, types.FunctionType):
            namespace[name] = _rebound(value, done)
    return made


def _cells(function: types.FunctionType, done: dict[int, Any]) -> tuple[types.CellType, ...] | None:
    if function.__closure__ is None:
        return None
    return tuple(
        types.CellType(_rebound(cell.cell_contents, done))
        if isinstance(cell.cell_contents, types.FunctionType)
        else cell
        for cell in function.__closure__
    )


def unfused(args: GemmArguments, outputs: Mapping[str, torch.Tensor]) -> None:
    """Write the outputs by plain PyTorch on A's device: every value of the graph full-size, one operation at a time."""
    graph = lower(args.graph, frozenset())
    space = Space.of(graph, args.problem.extents)
    numbers = scalars(args)
    values: dict[Node, Any] = {}
    for node in graph.nodes:
        operands = [values[arg] for arg in node.args]
        values[node] = (
            _LEAVES[node.op](node, args, graph, space, numbers) if not operands else _apply(node, operands, space)
        )
    for output in graph.outputs:
        shape = shape_of(output.dims or (), args.problem.extents)
        destination = space.view(outputs[output.name].view(shape), output.dims or ())
        store(values[output.node].expand(destination.shape), destination)


def _apply(node: Node, operands: list[torch.Tensor], space: Space) -> Any:
    if node.op == "reduce":
        name, gone = node.attr
        return REDUCTIONS[name].meaning(operands[0], tuple(space.dimensions(gone)), True)
    if node.op == "cast":
        return operands[0].to(node.attr)
    if node.op == "debug_print":
        return debug_print(node.attr, operands[0])
    return PRIMITIVES[node.op].meaning(*operands)


def _accum(node: Node, args: GemmArguments, graph: Graph, space: Space, numbers: Mapping[str, Any]) -> torch.Tensor:
    problem = args.problem
    wide = torch.float64 if problem.accumulator in (torch.int32, torch.float64) else torch.float32
    product = torch.matmul(args.A.to(wide), args.B.to(wide)).to(problem.accumulator)
    held = problem.float_dtype if problem.accumulator.is_floating_point else torch.int32
    return space.view(product.to(held), problem.accum_dims)


def _load(node: Node, args: GemmArguments, graph: Graph, space: Space, numbers: Mapping[str, Any]) -> torch.Tensor:
    load = node.attr
    assert isinstance(load, Load)
    kind = graph.types[node].kind
    dtype = {"mask": torch.bool, "int32": torch.int32, "int64": torch.int64}.get(kind, args.problem.float_dtype)
    if load.name in numbers:
        return torch.tensor(numbers[load.name], dtype=dtype, device=args.A.device)
    return space.view(viewed(args.epilogue.tensors[load.name], load), load.dims or ()).to(dtype)


def _const(node: Node, args: GemmArguments, graph: Graph, space: Space, numbers: Mapping[str, Any]) -> torch.Tensor:
    value = node.attr
    dtype = args.problem.float_dtype if isinstance(value, float) else None
    return torch.tensor(value, dtype=dtype, device=args.A.device)


def _index(node: Node, args: GemmArguments, graph: Graph, space: Space, numbers: Mapping[str, Any]) -> torch.Tensor:
    dim: Any = node.attr
    count = dim_size(dim, args.problem.extents)
    return space.view(torch.arange(count, dtype=torch.int32, device=args.A.device), (dim,))


_LEAVES: dict[str, Callable[..., torch.Tensor]] = {"accum": _accum, "load": _load, "const": _const, "index": _index}
