"""A graph as written, run as plain operations of PyTorch, which are traced, differentiated and compiled in its place.

Tensors may be those of any mode: fake tensors, proxies, tensors of vmap, tensors with symbolic sizes. Numbers stay
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from epifuse.base.dtypes import BY_TORCH, dtype_of
from epifuse.base.errors import fail
from epifuse.fusion import forms, host
from epifuse.fusion.literals import rounded_like
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.reduction import REDUCTIONS
from epifuse.ir import Builder, Graph, Node, Output, rewrite
from epifuse.ir.graph import keep
from epifuse.passes.parts import part_of
from epifuse.providers.cpu.space import cut, viewed
from epifuse.pytorch import random
from epifuse.pytorch.operations import Arithmetic, computed, softmax_of


def interpret(graph: Graph, accum: torch.Tensor, operands: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the outputs of `graph`, a graph as written, by name and before they are converted to be stored. Floats are
    float32, or float64 if `accum` is.

    `accum` is the product, (..., M, N). `operands` are tensors and numbers by name. Effects are not run. Raises
    `ArgumentError` if Python refuses the arithmetic of numbers.
    """
    arithmetic = Arithmetic(torch.float64 if accum.dtype == torch.float64 else torch.float32, accum.device)
    loaded = {name: _loaded(value, arithmetic.floating) for name, value in operands.items()}
    graph = _unclaimed(graph, loaded)
    walk = _Walk(graph, accum, loaded, arithmetic)
    return {output.name: walk.tensor(output.node) for output in graph.outputs}


def host_numbers(graph: Graph, accum: torch.Tensor, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers that the host computes for a typed graph, by name. One computed from a tensor is a tensor."""
    floating = torch.float64 if accum.dtype == torch.float64 else torch.float32
    loaded = {name: _loaded(value, floating) for name, value in operands.items()}
    graph = graph.with_roots([Output(name, root) for name, root in graph.hosts.items()], ())
    walk = _Walk(graph, accum, loaded, Arithmetic(floating, accum.device))
    return {output.name: walk.operand(output.node) for output in graph.outputs}


def _loaded(value: Any, floating: torch.dtype) -> Any:
    """An operand as an epilogue sees it: floats in the dtype of the arithmetic, small integers as int32."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(dtype_of(BY_TORCH[value.dtype].loads_as, floating))


def _unclaimed(graph: Graph, operands: Mapping[str, Any]) -> Graph:
    """The graph without claims, which say something about their first argument: this argument takes their place."""

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        upright = old.op == "access" and isinstance(operands[args[0].attr.name], torch.Tensor)
        return args[0] if old.op in _CLAIMS and not upright else keep(old, args, builder)

    return rewrite(graph, rule)


_CLAIMS = ("access", "assume_one_hot", "debug_print", "tensor", "torch")


class _Walk:
    """Computes the nodes of a graph. `values` has the tensors, and None for a number: this is computed when used."""

    def __init__(self, graph: Graph, accum: torch.Tensor, operands: Mapping[str, Any], arithmetic: Arithmetic) -> None:
        self.graph, self.accum, self.operands, self.arithmetic = graph, accum, operands, arithmetic
        self.values: dict[Node, Any] = {}
        self.numbers: dict[Node, Any] = {}
        for node in graph.nodes:
            self.values[node] = self._value(node)

    def tensor(self, node: Node) -> torch.Tensor:
        """The value of a node as a tensor, also if it is a number."""
        found = self.operand(node)
        return found if isinstance(found, torch.Tensor) else self.arithmetic.filled(found)

    def operand(self, node: Node) -> Any:
        """The value of a node: a tensor, or a number in Python's own arithmetic."""
        if (value := self.values[node]) is not None:
            return value
        try:
            return host.evaluate(node, lambda load: self.operands[load.attr.name], self.numbers)
        except host.HostError as error:
            raise fail("host_arithmetic", self.graph.loc(error.node), detail=str(error)) from None

    def _value(self, node: Node) -> Any:
        if node.op == "accum":
            return self.accum if node.attr is None else self.accum.transpose(0, 1)
        if node.op == "axis":
            self.numbers[node] = (1, *self.accum.shape)["lmn".index(node.attr) - 3]
            return None
        if node.op == "load":
            value = self.operands[node.attr.name]
            return viewed(value, node.attr, torch.Tensor.reshape) if isinstance(value, torch.Tensor) else None
        if (number := _NUMBERS.get(node.op)) is not None:
            self.numbers[node] = number(node.attr, self.values[node.args[0]])
            return None
        if node.op == "rounded_like" and self.values[node.args[0]] is None:
            self.numbers[node] = self.operand(node.args[0])
            return None
        if all(self.values[arg] is None for arg in node.args):
            return None
        if (whole := softmax_of(node)) is not None and len(whole.over) == 1:
            return whole.function(self.operand(whole.x), *whole.over)
        args = [self.operand(arg) for arg in node.args]
        if (rule := _RULES.get(node.op)) is not None:
            return rule(node.attr, *args, accum=self.accum)
        return computed(node.op, node.attr, args, self.arithmetic)


# --- what has a form of its own --------------------------------------------------------------------------------------


def _host(attr: Any, *args: Any, accum: torch.Tensor) -> Any:
    hint = "hand it Python's numbers: a tensor has no value while it is traced"
    raise fail("host_wanted", None, what=attr, hint=hint)


def _select(attr: Any, condition: Any, x: Any, y: Any, *, accum: torch.Tensor) -> Any:
    if isinstance(condition, torch.Tensor):
        return PRIMITIVES["where"].meaning(condition != 0, x, y)
    return x if condition else y


def _expanded(attr: Any, x: Any, like: torch.Tensor, *, accum: torch.Tensor) -> torch.Tensor:
    return (x if isinstance(x, torch.Tensor) else like.new_full((), x)).expand(like.shape)


def _access(attr: Any, x: torch.Tensor, *, accum: torch.Tensor) -> torch.Tensor:
    """An operand of a visitor tree. A vector that is a column becomes (M, 1)."""
    return x.unsqueeze(1) if attr[0] == "column" and x.dim() == 1 and x.shape[0] != 1 else x


def _reduced(attr: Any, x: torch.Tensor, *, accum: torch.Tensor) -> torch.Tensor:
    name, dims, keepdim = attr
    return REDUCTIONS[name].meaning(x, dims, keepdim)


def _reduced_axes(attr: Any, x: torch.Tensor, *, accum: torch.Tensor) -> torch.Tensor:
    """A reduction of a visitor tree: it reduces a value of accum's shape over axes of the product."""
    name, axes = attr
    dims = tuple(i for i, axis in enumerate("lmn"[3 - accum.dim() :]) if axis in axes)
    return REDUCTIONS[name].meaning(x.expand(accum.shape), dims, False)


def _sizes(known: Any, further: Iterable[Any]) -> tuple[Any, ...]:
    """The integers `known`, with each None replaced by the next of `further`."""
    further = iter(further)
    return tuple(next(further) if number is None else number for number in known)


def _part(attr: Any, x: torch.Tensor, *further: Any, accum: torch.Tensor) -> torch.Tensor:
    dim, how, numbers = attr
    return cut(x, dim, *part_of(how, _sizes(numbers, further), x.shape[dim]))


def _join(attr: Any, *values: torch.Tensor, accum: torch.Tensor) -> torch.Tensor:
    dim, how = attr
    return getattr(torch, how)(values, dim)  # type: ignore[no-any-return]  # a function of PyTorch


def _rearranged(attr: Any, x: torch.Tensor, *further: Any, accum: torch.Tensor) -> torch.Tensor:
    how, numbers = attr[0], _sizes(attr[1], further)
    arguments = (numbers[0], numbers[1:]) if how == "unflatten" else numbers
    return getattr(x, how)(*arguments)  # type: ignore[no-any-return]  # a method of a tensor


def _extent(attr: Any, x: torch.Tensor) -> Any:
    dims, _ = attr
    return x.numel() if dims is None else math.prod(x.shape[dim] for dim in dims)


def _limit(name: Any, x: torch.Tensor) -> Any:
    return getattr((torch.finfo if x.dtype.is_floating_point else torch.iinfo)(x.dtype), name)


def _full_like(dtype: Any, x: torch.Tensor, value: Any, *, accum: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, value, dtype=dtype)


def _coordinate(attr: Any, x: torch.Tensor, *, accum: torch.Tensor) -> Any:
    return forms.index_along(x, attr) if isinstance(attr, int) else getattr(forms, f"index_{attr}")(x)


def _gathered(dim: Any, x: torch.Tensor, index: torch.Tensor, *, accum: torch.Tensor) -> torch.Tensor:
    """`gather` as an epilogue computes it: 0 if there is no element at the index."""
    return torch.where(forms.index_along(x, dim) == index, x, 0).sum(dim, keepdim=True, dtype=x.dtype)


_NUMBERS: Mapping[str, Callable[..., Any]] = {"extent": _extent, "limit": _limit}
"""Operations that take a number from a tensor."""

_RULES: Mapping[str, Callable[..., Any]] = {
    "permute": lambda dims, x, accum: x.permute(dims),
    "reshape": lambda shape, x, *further, accum: x.reshape(_sizes(shape, further)),
    "unsqueeze": lambda dim, x, accum: x.unsqueeze(dim),
    "part": _part,
    "join": _join,
    "roll": lambda attr, x, accum: x.roll(attr[1], attr[0]),
    "rearrange": _rearranged,
    "expand_as": _expanded,
    "coordinate": _coordinate,
    "gather": _gathered,
    "full_like": _full_like,
    "cast_like": lambda _, x, like, accum: x.to(like.dtype),
    "rounded_like": lambda _, x, *others, accum: rounded_like(x, *others),
    "linear_index": lambda _, x, accum: random.positions(x.shape, x.device),
    "number": lambda _, x, accum: x,
    "access": _access,
    "reduce_dims": _reduced,
    "reduce_axes": _reduced_axes,
    "select": _select,
    "host": _host,
}
