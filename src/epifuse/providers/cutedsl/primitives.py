"""The device table: one row a primitive, on TensorSSA fragments. FAST holds fast forms of activations.

PyTorch's semantics: `max` and `min` propagate NaN, `round` is half to even. No mask is made by `.to(Boolean)`, which is
inverted for floats in CuTe DSL 4.8.1, and `~mask` is written as a comparison, since the operator does not compile.
"""

from collections.abc import Callable, Mapping
from typing import Any

import cutlass.cute as cute
from cutlass import Float32

Fragment = Any  # cute.TensorSSA
_LOG2_E = 1.4426950408889634


def _like(x: Fragment, value: float) -> Fragment:
    return cute.full_like(x, value)


def each(function: Callable[[Any], Any], *fragments: Fragment) -> Fragment:
    """Apply a scalar function element by element; unrolled while tracing."""
    out = cute.make_rmem_tensor(fragments[0].shape, Float32)
    for i in range(cute.size(fragments[0].shape)):
        out[i] = function(*(fragment[i] for fragment in fragments))
    return out.load()


def _maximum(x: Fragment, y: Fragment) -> Fragment:
    if x.element_type is Float32:
        return cute.math.max(x, y, propagate_nan=True)
    return cute.where(x > y, x, y)


def _minimum(x: Fragment, y: Fragment) -> Fragment:
    if x.element_type is Float32:
        return cute.math.min(x, y, propagate_nan=True)
    return cute.where(x < y, x, y)


def _abs(x: Fragment) -> Fragment:
    return abs(x)


def _sign(x: Fragment) -> Fragment:
    one, zero = _like(x, 1), _like(x, 0)
    return cute.where(x > zero, one, cute.where(x < zero, -one, zero))


def _rcp(x: Fragment) -> Fragment:
    return _like(x, 1.0) / x


PRIMITIVE_ROWS: Mapping[str, Callable[..., Fragment]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "pow": lambda x, y: cute.math.pow(x, y),
    "neg": lambda x: -x,
    "abs": _abs,
    "sign": _sign,
    "multiply_add": lambda x, y, z: x * y + z,
    "maximum": _maximum,
    "minimum": _minimum,
    "clip": lambda x, low, high: _minimum(_maximum(x, low), high),
    "sqrt": lambda x: cute.math.sqrt(x),
    "rsqrt": lambda x: cute.math.rsqrt(x),
    "reciprocal": _rcp,
    "exp": lambda x: cute.math.exp(x),
    "exp2": lambda x: cute.math.exp2(x),
    "log": lambda x: cute.math.log(x),
    "log2": lambda x: cute.math.log2(x),
    "log1p": lambda x: cute.math.log1p(x),
    "sin": lambda x: cute.math.sin(x),
    "cos": lambda x: cute.math.cos(x),
    "tan": lambda x: cute.math.tan(x),
    "tanh": lambda x: cute.math.tanh(x),
    "erf": lambda x: cute.math.erf(x),
    "floor": lambda x: cute.math.floor(x),
    "ceil": lambda x: cute.math.ceil(x),
    "round": lambda x: cute.math.roundeven(x),
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "logical_and": lambda x, y: x & y,
    "logical_or": lambda x, y: x | y,
    "logical_not": lambda x: x == False,  # noqa: E712 - `~x` does not compile for masks
    "where": lambda condition, x, y: cute.where(condition, x, y),
}


def _sigmoid(x: Fragment) -> Fragment:
    # ex2.approx and rcp.approx: two instructions of the special function unit instead of about 45 of the rest.
    return each(cute.arch.rcp_approx, cute.math.exp2(x * _like(x, -_LOG2_E), fastmath=True) + _like(x, 1.0))


def _gelu_tanh(x: Fragment) -> Fragment:
    # 0.5 x (1 + tanh u) = x sigmoid(2 u)
    u = x * (x * x * _like(x, 0.044715) + _like(x, 1.0))
    return x * _sigmoid(u * _like(x, 2 * 0.7978845608028654))


FAST: Mapping[str, Callable[..., Fragment]] = {
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "gelu_tanh": _gelu_tanh,
}
