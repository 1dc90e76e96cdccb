"""What is measured: one case a function of the vocabulary that gives floats, with its truth in float64."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import epifuse as ef
from epifuse.fusion import activation
from epifuse.fusion.primitives import PRIMITIVES

Function = Callable[..., torch.Tensor]
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


class Case(NamedTuple):
    """`expression` over the operands x, y, z; `truth` in float64; `torch` is PyTorch's own float32 function.

    `key` is the operand that takes every bit pattern; the others are drawn as `others` says. A composite is compared
    with PyTorch's error, a primitive is not. Within `root` the result passes through zero.
    """

    name: str
    expression: str
    truth: Function
    torch: Function
    composite: bool
    arity: int = 1
    key: int = 0
    others: str = "normal"
    root: tuple[float, float] = (0.0, 0.0)


def _sigmoid_of_gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(2 * _SQRT_2_OVER_PI * (x + 0.044715 * x**3))


def _dgelu_tanh(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    s = _sigmoid_of_gelu(x)
    below = torch.sigmoid(-2 * _SQRT_2_OVER_PI * (x + 0.044715 * x**3))
    return dy * (s + 2 * x * s * below * _SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x * x))


def _dgelu_erf(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return dy * (torch.special.erfc(-x / math.sqrt(2)) / 2 + x * density)


def _tanh_log1p_exp(x: torch.Tensor) -> torch.Tensor:
    """tanh(log(1 + e)) = n / (n + 2), n = e (e + 2)."""
    e = torch.exp(torch.clamp(x, max=300))
    n = e * (e + 2)
    return n / (n + 2)


# Where the body itself cancels, in float64 too.
_TRUTH: Mapping[str, Function] = {
    "gelu_erf": lambda x: x * torch.special.erfc(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x * _sigmoid_of_gelu(x),
    "dgelu_tanh": _dgelu_tanh,
    "dgelu_erf": _dgelu_erf,
    "mish": lambda x: x * _tanh_log1p_exp(x),
    "expm1": torch.expm1,
    "elu": lambda x: torch.where(x > 0, x, torch.expm1(x)),
    "sigmoid": torch.sigmoid,
}
_TRUTH = {**_TRUTH, "gelu": _TRUTH["gelu_erf"], "dgelu": _TRUTH["dgelu_erf"]}
_TORCH: Mapping[str, Function] = {
    "gelu": F.gelu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "elu": F.elu,
    "sigmoid": torch.sigmoid,
    "expm1": torch.expm1,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
}
# Where the slope of gelu is zero, at -0.7525 and -0.7518.
_ROOTS = {"dgelu": (-0.76, -0.74), "dgelu_tanh": (-0.76, -0.74), "dgelu_erf": (-0.76, -0.74)}
_FLOATS = ("arithmetic", "subtract", "floating", "divide", "power", "same")


def _primitive(name: str) -> Case:
    arity = PRIMITIVES[name].arity
    meaning = getattr(ef, name)
    others = {"div": "patterns", "pow": "powers"}.get(name, "normal")
    return Case(name, f"{name}({', '.join('xyz'[:arity])})", meaning, meaning, False, arity, 0, others)


def _activation(name: str, function: Any) -> Case:
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    key = needed.index("x")
    expression = f"{name}({', '.join('xyz'[: len(needed)])})"
    meanings = _TRUTH.get(name, function), _TORCH.get(name, function)
    return Case(name, expression, *meanings, True, len(needed), key, root=_ROOTS.get(name, (0.0, 0.0)))


def _activations() -> Mapping[str, Any]:
    return {
        name: function
        for name, function in vars(activation).items()
        if inspect.isfunction(function) and function.__module__ == activation.__name__ and not name.startswith("_")
    }


# Forms that a number known while compiling gives.
_LITERALS = (
    Case("x / 3", "x / 3.0", lambda x: x / 3, lambda x: x / 3, False),
    Case("x ** 3", "x ** 3", lambda x: x**3, lambda x: x**3, False),
    Case("x ** 7", "x ** 7", lambda x: x**7, lambda x: x**7, False),
    Case("x ** 0.5", "x ** 0.5", torch.sqrt, torch.sqrt, False),
    Case("x ** -0.5", "x ** -0.5", torch.rsqrt, torch.rsqrt, False),
    Case("x ** -1", "x ** -1", torch.reciprocal, torch.reciprocal, False),
    Case("x ** -2", "x ** -2", lambda x: 1 / (x * x), lambda x: x**-2.0, True),
    Case("softplus, beta 2", "softplus(x, 2.0)", lambda x: F.softplus(x, 2.0), lambda x: F.softplus(x, 2.0), True),
)
CASES = (
    *(_primitive(name) for name, row in PRIMITIVES.items() if row.rule in _FLOATS),
    *(_activation(name, function) for name, function in _activations().items()),
    *_LITERALS,
)
