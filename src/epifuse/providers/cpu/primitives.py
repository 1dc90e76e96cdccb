"""The CPU's table of primitives. Each row is a function `row(*tensors, out=...)`; numbers are passed as 0-d tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from epifuse.providers.cpu.random import random_row

Row = Callable[..., Any]


def _multiply_add(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(z, x, y, out=out)


PRIMITIVE_ROWS: Mapping[str, Row] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "pow": torch.pow,
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "multiply_add": _multiply_add,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clip": torch.clamp,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "log1p": torch.log1p,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "atan2": torch.atan2,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_not": torch.logical_not,
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
    "bitwise_not": torch.bitwise_not,
    "bitwise_left_shift": torch.bitwise_left_shift,
    "bitwise_right_shift": torch.bitwise_right_shift,
    "where": torch.where,
    "philox_rand": random_row("philox_rand"),
    "philox_rand_cpp": random_row("philox_rand_cpp"),
}

_nn: Any = torch._C._nn  # torch.ops.aten has the same functions, but takes a microsecond to look up each call


def _relu(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.clamp_min(x, 0, out=out)


def _gelu_erf(x: torch.Tensor, *, out: torch.Tensor) -> Any:
    # torch hands a dense x to oneDNN, whose result never reaches an `out` with other strides.
    return _nn.gelu(x, out=out) if out.is_contiguous() else out.copy_(_nn.gelu(x))


def _gelu_tanh(x: torch.Tensor, *, out: torch.Tensor) -> Any:
    return _nn.gelu(x, approximate="tanh", out=out)


FAST: Mapping[str, Row] = {
    "relu": _relu,
    "sigmoid": torch.sigmoid,
    "silu": _nn.silu,
    "gelu_erf": _gelu_erf,
    "gelu_tanh": _gelu_tanh,
    "hardswish": _nn.hardswish,
    "hardsigmoid": _nn.hardsigmoid,
    "mish": _nn.mish,
    "expm1": torch.expm1,
    "square": torch.square,
}
"""Activations that torch computes in one call: one pass over the panel instead of one for each step of the body."""
