"""Activations and their derivatives, written in the epilogue language itself: one public function, one activation.

Called on tensors each is plain PyTorch. In an epilogue it is parsed like a user's own function, and a provider may have
a faster form (`FAST`) that a conformance test compares with the body. A parameter annotated with anything but `Value`
is fixed when the epilogue is parsed. Formulas are PyTorch's of the same name unless the docstring says otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

import torch
import torch.nn.functional as F

from epifuse.fusion.literals import checked, in_float32
from epifuse.fusion.primitives import (
    Value,
    abs,
    clip,
    erf,
    exp,
    exp2,
    floor,
    log1p,
    log2,
    maximum,
    minimum,
    sin,
    tanh,
    where,
)

_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805
_SQRT_HALF = 0.7071067811865476
_INV_SQRT_2PI = 0.3989422804014327
_SQRT_2_OVER_PI = 0.7978845608028654
_LEAST_NORMAL = 2.0**-126


def _as_torch(function: Callable[..., Value]) -> Callable[..., Value]:
    """Have `function` call PyTorch's function of the same name on floats. The derivatives of the two differ at ties, at
    bounds and where an exponential overflows."""
    own = getattr(F if hasattr(F, function.__name__) else torch, function.__name__)

    @functools.wraps(function)
    def call(x: Value, *further: Any, **named: Any) -> Value:
        numbers = not any(isinstance(value, torch.Tensor) for value in (*further, *named.values()))
        if isinstance(x, torch.Tensor) and x.is_floating_point() and numbers:
            with suppress(ValueError):  # of hardtanh, where the smaller bound is the larger one
                return own(x, *further, **named)
        return function(x, *further, **named)

    return call


def identity(x: Value) -> Value:
    """x."""
    return x


def square(x: Value) -> Value:
    """x * x."""
    return x * x


@_as_torch
def relu(x: Value) -> Value:
    """max(x, 0); NaN stays NaN."""
    return maximum(x, 0)


@_as_torch
def relu6(x: Value) -> Value:
    """min(max(x, 0), 6)."""
    return clip(x, 0, 6)


def leaky_relu(x: Value, negative_slope: Value = 0.01) -> Value:
    """x above zero, negative_slope * x elsewhere."""
    return where(x > 0, x, x * negative_slope)


def prelu(x: Value, weight: Value) -> Value:
    """x above zero, weight * x elsewhere; the slope is a scalar or any operand that broadcasts."""
    return where(x > 0, x, weight * x)


@_as_torch
def elu(x: Value, alpha: Value = 1.0) -> Value:
    """x above zero, alpha * (exp(x) - 1) elsewhere."""
    return where(x > 0, x, alpha * expm1(x))


@_as_torch
def selu(x: Value) -> Value:
    """elu scaled so that it keeps mean 0 and variance 1 (arXiv 1706.02515)."""
    return _SELU_SCALE * where(x > 0, x, _SELU_ALPHA * expm1(x))


def softsign(x: Value) -> Value:
    """x / (1 + abs(x))."""
    return x / (1.0 + abs(x))


def tanhshrink(x: Value) -> Value:
    """x - tanh(x)."""
    return x - tanh(x)


@_as_torch
def expm1(x: Value) -> Value:
    """exp(x) - 1, accurate near zero: 2 sinh(x/2) exp(x/2) by way of tanh."""
    half = tanh(x * 0.5)
    return where(abs(x) < 1.0, 2.0 * half / (1.0 - half), exp(x) - 1.0)


@_as_torch
def sigmoid(x: Value) -> Value:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + exp(-x))


@_as_torch
def logsigmoid(x: Value) -> Value:
    """log(sigmoid(x)), without overflow."""
    return minimum(x, 0) - log1p(exp(-abs(x)))


def gelu_erf(x: Value) -> Value:
    """0.5 x (1 + erf(x / sqrt 2)): torch's gelu(approximate="none")."""
    return 0.5 * x * (1.0 + erf(x * _SQRT_HALF))


def gelu_tanh(x: Value) -> Value:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): torch's gelu(approximate="tanh")."""
    return 0.5 * x * (1.0 + tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)))


@checked
def gelu(x: Value, approximate: Literal["none", "tanh"] = "none") -> Value:
    """gelu_erf, or gelu_tanh with approximate="tanh"."""
    return gelu_tanh(x) if approximate == "tanh" else gelu_erf(x)


def quick_gelu(x: Value) -> Value:
    """x sigmoid(1.702 x), the approximation of the GELU paper (arXiv 1606.08415)."""
    return x * sigmoid(1.702 * x)


@_as_torch
def silu(x: Value) -> Value:
    """x sigmoid(x)."""
    return x * sigmoid(x)


@_as_torch
def hardswish(x: Value) -> Value:
    """x relu6(x + 3) / 6."""
    return x * relu6(x + 3.0) / 6.0


@_as_torch
def hardsigmoid(x: Value) -> Value:
    """relu6(x + 3) / 6."""
    return relu6(x + 3.0) / 6.0


@_as_torch
def hardtanh(x: Value, min_val: Value = -1.0, max_val: Value = 1.0) -> Value:
    """x clamped to [min_val, max_val]."""
    return clip(x, min_val, max_val)


@_as_torch
def softplus(x: Value, beta: Value = 1.0, threshold: Value = 20.0) -> Value:
    """log(1 + exp(beta x)) / beta; x itself where beta x exceeds the threshold."""
    scaled = x * beta
    return where(scaled > threshold, x, (maximum(scaled, 0) + log1p(exp(-abs(scaled)))) / beta)


def _softplus_plain(x: Value) -> Value:
    """As PyTorch's compiler writes it. With a threshold above 88 exp(x) would overflow where softplus does not."""
    return where(x > 20.0, x, log1p(exp(x)))


SPELLINGS: Mapping[str, tuple[Callable[..., Value], ...]] = {"softplus": (_softplus_plain,)}
"""Other bodies of activations, as graphs contain them. A parameter that one lacks has its default."""


@_as_torch
def mish(x: Value) -> Value:
    """x tanh(softplus(x))."""
    return x * tanh(maximum(x, 0) + log1p(exp(-abs(x))))


def squared_relu(x: Value) -> Value:
    """relu(x)^2 (Primer, arXiv 2109.08668)."""
    positive = relu(x)
    return positive * positive


def snake(x: Value, a: Value = 1.0) -> Value:
    """x + sin^2(a x) / a (arXiv 2006.08195; CUTLASS's Snake)."""
    wave = sin(a * x)
    return x + wave * wave / a


@in_float32
def floor_power_of_two(x: Value) -> Value:
    """The largest power of two that is at most x, as float32 holds it: 0 where x is below 2^-126, and NaN below zero.

    Its derivative is 0. Of a tensor of 16 bits it is a float32.
    """
    is_less = abs(x) < _LEAST_NORMAL
    near = exp2(floor(log2(where(is_less, 1.0, x))))  # a last bit of log2 makes it the next power
    power = where(near > x, near * 0.5, where(near * 2.0 > x, near, near * 2.0))
    return where(is_less, 0.0, power)


def threshold(x: Value, threshold: Value, value: Value) -> Value:
    """x above the threshold, value elsewhere; NaN stays NaN, as in torch."""
    return where(x <= threshold, value, x)


def drelu(dy: Value, x: Value) -> Value:
    """Derivative of relu: dy where x > 0, else 0. `x` is the value before the activation."""
    return where(x > 0, dy, 0.0)


def dsilu(dy: Value, x: Value) -> Value:
    """Derivative of silu: dy s (1 + x (1 - s)) with s = sigmoid(x)."""
    s = sigmoid(x)
    return dy * s * (1.0 + x * (1.0 - s))


def dgelu_erf(dy: Value, x: Value) -> Value:
    """Derivative of gelu_erf: dy (Phi(x) + x phi(x)) of the normal distribution."""
    return dy * (0.5 * (1.0 + erf(x * _SQRT_HALF)) + x * _INV_SQRT_2PI * exp(-0.5 * x * x))


def dgelu_tanh(dy: Value, x: Value) -> Value:
    """Derivative of gelu_tanh."""
    t = tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))
    inner = _SQRT_2_OVER_PI * (1.0 + 3.0 * 0.044715 * x * x)
    return dy * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner)


@checked
def dgelu(dy: Value, x: Value, approximate: Literal["none", "tanh"] = "none") -> Value:
    """dgelu_erf, or dgelu_tanh with approximate="tanh"."""
    return dgelu_tanh(dy, x) if approximate == "tanh" else dgelu_erf(dy, x)
