"""The operations of a graph as functions of PyTorch tensors, which autograd differentiates and make_fx records.

A function that PyTorch has is called as a whole, not as its formula. PyTorch's derivative is right where that of a
formula overflows, and at ties and bounds. For example the derivative of 1 / (1 + exp(-x)), taken step by step, is NaN
at -100.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from epifuse.base.dtypes import dtype_of
from epifuse.frontend import activation_body
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.ir import Node
from epifuse.ir.graph import applied
from epifuse.pytorch import random


class Arithmetic(NamedTuple):
    """The dtype of floating-point values and the device on which they are computed."""

    floating: torch.dtype
    device: torch.device

    def filled(self, value: Any) -> torch.Tensor:
        """The number `value` as a tensor of rank 0, made by an operation that make_fx can record."""
        kind = _KINDS.get(type(value), "float")
        return torch.full((), value, dtype=dtype_of(kind, self.floating), device=self.device)


_KINDS = {bool: "mask", torch.SymBool: "mask", int: "int32", torch.SymInt: "int32"}


def computed(op: str, attr: Any, args: Sequence[Any], at: Arithmetic) -> Any:
    """The value of a primitive, an activation or a cast. `args` are tensors and numbers, at least one a tensor."""
    if op == "cast":
        return (args[0] if isinstance(args[0], torch.Tensor) else at.filled(args[0])).to(attr)
    if op == "call":
        return _activation(str(attr), args, at)
    return random.drawn(op, *args) if op in random.NAMES else _primitive(op, args, at)


def _primitive(op: str, args: Sequence[Any], at: Arithmetic) -> Any:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    row = PRIMITIVES[op]
    if not any(tensor.is_floating_point() for tensor in tensors):  # else PyTorch computes in its default dtype
        args = [at.filled(arg) if isinstance(arg, (float, torch.SymFloat)) else arg for arg in args]
        if row.rule in ("floating", "divide"):
            args = [arg.to(at.floating) if isinstance(arg, torch.Tensor) else arg for arg in args]
    if op == "where" or not tensors:
        args = [arg if isinstance(arg, torch.Tensor) else at.filled(arg) for arg in args]
    return row.meaning(*args)


# --- softmax ---------------------------------------------------------------------------------------------------------


class Softmax(NamedTuple):
    """A softmax or log_softmax: PyTorch's function, its argument, and the dims (or factors, if typed) it sums over."""

    function: Callable[[torch.Tensor, int], torch.Tensor]
    x: Node
    over: tuple[Any, ...]


def softmax_of(node: Node) -> Softmax | None:
    """The softmax or log_softmax whose last step is `node`, or None. The graph may be typed or not.

    PyTorch's derivative of the whole function leaves out the shift by the maximum, which cancels. The derivative of the
    maximum itself would compare it with each element. PyTorch's compiler may compute the elements again in the backward
    pass and leave some roundings out. Then no element equals the maximum, and the gradient is 0 / 0.
    """
    if node.op not in ("div", "sub"):
        return None
    above, below = node.args
    if node.op == "sub":
        if below.op != "log":
            return None
        (below,) = below.args
    if below.op not in _REDUCES or below.attr[0] != "sum" or below.args[0].op != "exp":
        return None
    powers = below.args[0]
    shifted = powers.args[0]
    if above is not (powers if node.op == "div" else shifted) or shifted.op != "sub":
        return None
    x, most = shifted.args
    over, kept = below.attr[1], below.attr[2:]
    if most.op not in _REDUCES or most.attr != ("amax", over, *kept) or most.args[0] is not x or False in kept:
        return None
    return Softmax(torch.softmax if node.op == "div" else torch.log_softmax, x, over or ())


_REDUCES = ("reduce", "reduce_dims")


# --- activations -----------------------------------------------------------------------------------------------------


def _elu(x: torch.Tensor, alpha: Any) -> torch.Tensor:
    return torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0)))


_OTHERWISE: Mapping[str, Callable[..., torch.Tensor] | None] = {
    "gelu_erf": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "elu": _elu,  # because F.elu takes no tensor as alpha
    "prelu": None,  # PyTorch's weight is a tensor with one element for each channel
}
"""Activations that have another name or other arguments in PyTorch; None if PyTorch has no such function."""


def _torchs(name: str) -> Callable[..., torch.Tensor] | None:
    if name in _OTHERWISE:
        return _OTHERWISE[name]
    return getattr(F, name, None) or getattr(torch, name, None)


def _activation(name: str, args: Sequence[Any], at: Arithmetic) -> Any:
    x, *further = args
    function = _torchs(name)
    plain = isinstance(x, torch.Tensor) and x.is_floating_point()
    if function and plain and (name == "elu" or not any(isinstance(arg, torch.Tensor) for arg in further)):
        return function(x, *further)
    body = activation_body(name)

    def make(node: Node, operands: tuple[Any, ...]) -> Any:
        return node.attr if node.op == "const" else computed(node.op, node.attr, operands, at)

    return applied(body, args, make)[body.outputs[0].node]
