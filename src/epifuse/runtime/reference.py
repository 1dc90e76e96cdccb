"""The meaning of an epilogue in plain PyTorch: as the user's own function, or as its graph, one operation at a time."""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from epifuse.base.dtypes import dtype_of
from epifuse.base.errors import fail, kind_of
from epifuse.frontend.names import known_function
from epifuse.fusion.forms import debug_print
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.reduction import along
from epifuse.fusion.vocabulary import BUILTINS, VOCABULARY
from epifuse.ir import Graph, Load, Node
from epifuse.ir.types import dim_size, shape_of
from epifuse.passes.lower import lower
from epifuse.plan.settle import Settled, old_contents
from epifuse.providers.cpu.product import exact
from epifuse.providers.cpu.space import Space, columns, picked, viewed
from epifuse.providers.cpu.store import store
from epifuse.request.problem import Problem
from epifuse.request.scaled import dequantised
from epifuse.request.signature import Call
from epifuse.runtime.numbers import scalars


def reference(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the builtins max, min, sum, abs, round, any, all and pow rebound to the vocabulary.

    Called as `reference(fn)(accum, **operands)` with float32 tensors, it returns what the fused epilogue computes,
    before outputs are stored. Operands of 8- and 16-bit integers reach the function as int32, as in the fused epilogue.
    One difference: a `gather` with an index out of range raises, as in PyTorch, and gives 0 in the fused call. Helpers
    that the function calls are rebound too. The function itself is not changed. A function of the vocabulary, of
    epifuse or torch, is its own reference. Raises `ArgumentTypeError` if `function` is not a function, a method, or a
    `functools.partial` of one.
    """
    done: dict[int, Any] = {}
    if isinstance(function, functools.partial):
        return functools.partial(reference(function.func), *function.args, **function.keywords)
    if isinstance(function, types.MethodType):
        return types.MethodType(_of_wide_integers(_rebound(function.__func__, done)), function.__self__)
    known = callable(function) and known_function(function, "function") is not None
    if not (known or isinstance(function, types.FunctionType)):
        raise fail("wrong_arguments", None, function="reference", want="a Python function", type=kind_of(function))
    rebound: Callable[..., Any] = _rebound(function, done)
    return rebound if rebound is function else _of_wide_integers(rebound)


def _of_wide_integers(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its arguments of uint8, int8 and int16 converted to int32."""

    def wide(value: Any) -> Any:
        is_narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.uint8, torch.int8, torch.int16)
        return value.to(torch.int32) if is_narrow else value

    @functools.wraps(function)
    def widened(*values: Any, **named: Any) -> Any:
        return function(*map(wide, values), **{name: wide(value) for name, value in named.items()})

    return widened


_REBOUND = {id(builtin): VOCABULARY[name].function for builtin, name in BUILTINS.items()}
_LIBRARIES = ("torch", "epifuse")


class _Module:
    """A user's module. Its functions are rebound when they are looked up."""

    def __init__(self, module: types.ModuleType, done: dict[int, Any]) -> None:
        self._module = module
        self._done = done

    def __getattr__(self, name: str) -> Any:
        return _rebound(getattr(self._module, name), self._done)


def _rebound(value: Any, done: dict[int, Any]) -> Any:
    """A function or a module of the user with the builtins rebound wherever it uses them; any other value as it is."""
    if id(value) in _REBOUND:
        return _REBOUND[id(value)]
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    if not isinstance(value, (types.FunctionType, types.ModuleType)) or str(name).split(".")[0] in _LIBRARIES:
        return value
    if isinstance(value, types.ModuleType):
        return _Module(value, done)
    if id(value) not in done:
        namespace: dict[str, Any] = dict(value.__globals__)
        # A cell that holds a number is shared with the original, so that the number is read when the function runs.
        cells = tuple(types.CellType() if _reaches(cell) else cell for cell in value.__closure__ or ())
        made = types.FunctionType(value.__code__, namespace, value.__name__, value.__defaults__, cells or None)
        made.__kwdefaults__ = value.__kwdefaults__
        done[id(value)] = functools.wraps(value)(made)
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            if cell is not old:
                cell.cell_contents = _rebound(old.cell_contents, done)
        for used in value.__code__.co_names:
            if used in namespace or hasattr(builtins, used):
                namespace[used] = _rebound(namespace.get(used, getattr(builtins, used, None)), done)
    return done[id(value)]


def _reaches(cell: types.CellType) -> bool:
    try:
        return callable(cell.cell_contents) or isinstance(cell.cell_contents, types.ModuleType)
    except ValueError:  # the enclosing function has not assigned the name yet
        return False


def unfused(call: Call, settled: Settled, outputs: Mapping[str, torch.Tensor]) -> None:
    """Compute the outputs by PyTorch on A's device, one operation at a time, with every value at full size."""
    problem, graph = settled.problem, lower(settled.structure.graph, frozenset())
    space = Space.of(graph, problem.extents)
    numbers = scalars(graph, problem, call.numbers)
    operands = {**call.tensors, **old_contents(graph, problem, outputs), **numbers}
    whole = _Whole(call.request.a, call.request.b, problem, graph, space, operands)
    values: dict[Node, Any] = {}
    for node in graph.nodes:
        below = [values[arg] for arg in node.args]
        if node.op == "debug_print" and not problem.batched:
            below = [value.squeeze(0) for value in below]  # values here have a batch dim, and the problem has none
        values[node] = _LEAVES[node.op](node, whole) if not below else _apply(node, below, space, graph)
    written = {tensor.untyped_storage().data_ptr() for tensor in outputs.values()}
    for node in [output.node for output in graph.outputs]:  # an operand as it is may share memory with an output
        if values[node].untyped_storage().data_ptr() in written:
            values[node] = values[node].clone()
    for output in graph.outputs:
        shape = shape_of(output.dims or (), problem.extents)
        destination = space.view(outputs[output.name].view(shape), output.dims or ())
        store(values[output.node].expand(destination.shape), destination)


class _Whole(NamedTuple):
    """All that the leaves of a graph read."""

    a: torch.Tensor
    b: torch.Tensor
    problem: Problem
    graph: Graph
    space: Space
    operands: Mapping[str, Any]


def _apply(node: Node, operands: list[torch.Tensor], space: Space, graph: Graph) -> Any:
    if node.op == "reduce":
        name, gone = node.attr
        return along(name, operands[0], space.dimensions(gone))
    if node.op == "pick":
        return picked(operands[0], space.places(node.attr))
    if node.op == "region":
        return columns(operands[0], space, node, graph.types)
    if node.op == "cast":
        return operands[0].to(node.attr)
    if node.op == "debug_print":
        return debug_print(node.attr, operands[0])
    return PRIMITIVES[node.op].meaning(*operands)


def _accum(node: Node, at: _Whole) -> torch.Tensor:
    problem = at.problem
    wide = torch.float64 if problem.accumulator in (torch.int32, torch.float64) else torch.float32
    a, b = dequantised(at.a, at.b, at.operands) if problem.scales else (at.a, at.b)
    product = exact(a.to(wide), b.to(wide))
    if problem.accumulator.is_floating_point:
        product = product.to(problem.accumulator).to(problem.float_dtype)
    else:
        product = product.to(torch.int64).to(torch.int32)  # float64 is exact, and int64 to int32 wraps
    return at.space.view(product, at.space.refined(problem.accum_dims))


def _load(node: Node, at: _Whole) -> torch.Tensor:
    load = node.attr
    assert isinstance(load, Load)
    dtype = dtype_of(at.graph.types[node].kind, at.problem.float_dtype)
    value = at.operands[load.name]
    if not isinstance(value, torch.Tensor):
        return torch.tensor(value, dtype=dtype, device=at.a.device)
    return at.space.view(viewed(value, load, torch.Tensor.reshape), load.dims or ()).to(dtype)


def _const(node: Node, at: _Whole) -> torch.Tensor:
    value = node.attr
    dtype = at.problem.float_dtype if isinstance(value, float) else None
    return torch.tensor(value, dtype=dtype, device=at.a.device)


def _index(node: Node, at: _Whole) -> torch.Tensor:
    dim: Any = node.attr
    count = dim_size(dim, at.problem.extents)
    return at.space.view(torch.arange(count, dtype=torch.int32, device=at.a.device), (dim,))


_LEAVES: dict[str, Callable[..., torch.Tensor]] = {"accum": _accum, "load": _load, "const": _const, "index": _index}
