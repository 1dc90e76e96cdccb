"""The operations of a graph in PyTorch's terms: what autograd differentiates and make_fx records.

Functions that PyTorch has itself are called there, since PyTorch's derivatives hold where a formula's overflow, and at
ties and bounds: that of 1 / (1 + exp(-x)), taken apart, is NaN at -100.
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
    """What values are computed in: floats in this dtype, on this device."""

    floating: torch.dtype
    device: torch.device

    def filled(self, value: Any) -> torch.Tensor:
        """A number as a tensor, made so that it can be recorded."""
        kind = _KINDS.get(type(value), "float")
        return torch.full((), value, dtype=dtype_of(kind, self.floating), device=self.device)


_KINDS = {bool: "mask", torch.SymBool: "mask", int: "int32", torch.SymInt: "int32"}


def computed(op: str, attr: Any, args: Sequence[Any], at: Arithmetic) -> Any:
    """The value of a primitive, an activation or a cast for these tensors and numbers, not all of them numbers."""
    if op == "cast":
        return (args[0] if isinstance(args[0], torch.Tensor) else at.filled(args[0])).to(attr)
    if op == "call":
        return _activation(str(attr), args, at)
    return random.drawn(op, *args) if op in random.NAMES else _primitive(op, args, at)


def _primitive(op: str, args: Sequence[Any], at: Arithmetic) -> Any:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    row = PRIMITIVES[op]
    if not any(tensor.is_floating_point() for tensor in tensors):  # PyTorch would compute in its default dtype
        args = [at.filled(arg) if isinstance(arg, (float, torch.SymFloat)) else arg for arg in args]
        if row.rule in ("floating", "divide"):
            args = [arg.to(at.floating) if isinstance(arg, torch.Tensor) else arg for arg in args]
    if op == "where" or not tensors:
        args = [arg if isinstance(arg, torch.Tensor) else at.filled(arg) for arg in args]
    return row.meaning(*args)


# --- softmax ---------------------------------------------------------------------------------------------------------


class Softmax(NamedTuple):
    """PyTorch's function of a value, and what its sum is over: dims as written, or factors."""

    function: Callable[[torch.Tensor, int], torch.Tensor]
    x: Node
    over: tuple[Any, ...]


def softmax_of(node: Node) -> Softmax | None:
    """What `node` is the last step of, in a graph as written or as typed, if it is a softmax or the logarithm of one.

    PyTorch's derivatives leave out the shift by the maximum, which cancels. That of the maximum compares it with each
    element, which PyTorch's compiler may compute again in the backward pass and leave some roundings out: then no
    element is the largest one, and the gradient is 0 / 0.
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
    "elu": _elu,  # also where alpha is no constant
    "prelu": None,  # its weight is a tensor of channels
}
"""Activations that PyTorch has by another name, or not in the form they have here."""


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
