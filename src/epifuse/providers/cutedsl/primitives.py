"""The device tables: one row for each primitive or activation, a function of TensorSSA fragments.

Rows are exact to a few units in the last place. `NARROW` and `FAST_MATH` hold cheaper rows for values that need less
(`precision.py`), and `INTEGER` those that differ for integers. docs/accuracy.md gives the error of each. No mask is
made by `.to(Boolean)`, which is inverted for floats in CuTe DSL 4.8.1, and `~mask` does not compile.
"""

from collections.abc import Callable, Mapping
from typing import Any

import cutlass.cute as cute

from epifuse.providers.cutedsl import activation_math as am
from epifuse.providers.cutedsl import device_math as dm
from epifuse.providers.cutedsl import integer_math as im
from epifuse.providers.cutedsl import random_math as rm
from epifuse.providers.cutedsl import wave_math as wm
from epifuse.providers.cutedsl.precision import Accuracy

Fragment = Any  # cute.TensorSSA
Row = Callable[..., Fragment]
Literals = tuple[float | int | None, ...]

PRIMITIVE_ROWS: Mapping[str, Row] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": dm.divide,
    "floor_divide": im.floor_divide,
    "remainder": im.remainder,
    "pow": dm.power,
    "neg": lambda x: -x,
    "abs": abs,
    "sign": dm.sign,
    "multiply_add": lambda x, y, z: x * y + z,
    "maximum": dm.maximum,
    "minimum": dm.minimum,
    "clip": lambda x, low, high: dm.minimum(dm.maximum(x, low), high),
    "sqrt": dm.sqrt,
    "rsqrt": lambda x: cute.math.rsqrt(x),
    "reciprocal": dm.reciprocal,
    "exp": lambda x: cute.math.exp(x),
    "exp2": lambda x: cute.math.exp2(x),
    "log": lambda x: cute.math.log(x),
    "log2": lambda x: cute.math.log2(x),
    "log1p": lambda x: cute.math.log1p(x),
    "sin": wm.sin,
    "cos": wm.cos,
    "tan": wm.tan,
    "atan2": lambda x, y: cute.math.atan2(x, y),
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
    "bitwise_and": lambda x, y: x & y,
    "bitwise_or": lambda x, y: x | y,
    "bitwise_xor": lambda x, y: x ^ y,
    "bitwise_not": lambda x: x ^ -1,
    "bitwise_left_shift": im.left_shift,
    "bitwise_right_shift": im.right_shift,
    "where": lambda condition, x, y: cute.where(condition, x, y),
    "philox_rand": rm.philox_rand,
    "philox_rand_cpp": rm.philox_rand_cpp,
}

INTEGER: Mapping[str, Row] = {"floor": lambda x: x, "ceil": lambda x: x, "round": lambda x: x}

FAST: Mapping[str, Row] = {
    "sigmoid": am.sigmoid,
    "silu": lambda x: x * am.sigmoid(x),
    "gelu_tanh": am.gelu_tanh,
    "gelu_erf": am.gelu_erf,
    "dgelu_tanh": am.dgelu_tanh,
    "dgelu_erf": am.dgelu_erf,
    "expm1": lambda x: cute.math.expm1(x),
    "softplus": am.softplus_row(dm.log1p_exp, dm.divide),
    "logsigmoid": lambda x: dm.minimum(x, dm.like(x, 0.0)) - dm.log1p_exp(-abs(x)),
    "mish": am.mish_row(lambda x: cute.math.exp(x)),
    "floor_power_of_two": dm.floor_power_of_two,
}
"""Activations with a device form of their own. The others are computed by the primitives of their definition."""

NARROW: Mapping[str, Row] = {
    "div": dm.divide_narrow,
    "reciprocal": dm.reciprocal_narrow,
    "sqrt": dm.square_root,
    "exp": dm.exp_narrow,
    "log": dm.log_narrow,
    "log2": dm.log2_narrow,
    "log1p": dm.log1p_narrow,
    "tanh": am.tanh_approx,
    "sigmoid": am.sigmoid_narrow,
    "silu": lambda x: x * am.sigmoid_narrow(x),
    "gelu_erf": am.gelu_erf_narrow,
    "dgelu_tanh": am.dgelu_tanh_narrow,
    "dgelu_erf": am.dgelu_erf_narrow,
    "expm1": dm.expm1_narrow,
    "softplus": am.softplus_row(dm.log1p_exp_narrow, dm.divide_narrow),
    "logsigmoid": lambda x: dm.minimum(x, dm.like(x, 0.0)) - dm.log1p_exp_narrow(-abs(x)),
    "mish": am.mish_row(dm.exp_narrow),
}

FAST_MATH: Mapping[str, Row] = {
    "div": lambda x, y: x * dm.rcp(y),
    "reciprocal": dm.rcp,
    "sqrt": lambda x: cute.math.sqrt(x, fastmath=True),
    "rsqrt": lambda x: cute.math.rsqrt(x, fastmath=True),
    "exp": lambda x: dm.ex2(x * dm.LOG2_E),
    "exp2": dm.ex2,
    "log": lambda x: cute.math.log2(x, fastmath=True) * dm.LN_2,
    "log2": lambda x: cute.math.log2(x, fastmath=True),
    "log1p": lambda x: cute.math.log2(x + 1.0, fastmath=True) * dm.LN_2,
    "sin": lambda x: cute.math.sin(x, fastmath=True),
    "cos": lambda x: cute.math.cos(x, fastmath=True),
    "tan": lambda x: cute.math.sin(x, fastmath=True) * dm.rcp(cute.math.cos(x, fastmath=True)),
    "tanh": am.tanh_approx,
    "sigmoid": am.sigmoid_by_tanh,
    "silu": lambda x: x * am.sigmoid_by_tanh(x),
    "gelu_tanh": lambda x: x * am.sigmoid_by_tanh(am.gelu_argument(x)),
    "expm1": lambda x: dm.ex2(x * dm.LOG2_E) - 1.0,
}

_TABLES: Mapping[Accuracy, tuple[Mapping[str, Row], ...]] = {
    "full": (PRIMITIVE_ROWS, FAST),
    "narrow": (NARROW, PRIMITIVE_ROWS, FAST),
    "fast": (FAST_MATH, NARROW, PRIMITIVE_ROWS, FAST),
}


def row(name: str, accuracy: Accuracy, kind: str, literals: Literals) -> Row:
    """The row that computes `name` for a result of this kind.

    `literals` has the value of each argument that is known while compiling, and None for the others."""
    if kind in ("int32", "int64") and name == "pow":
        return im.power(int(literals[1] or 0))
    if kind in ("int32", "int64") and name in INTEGER:
        return INTEGER[name]
    special = SPECIALISED[name](accuracy, literals) if name in SPECIALISED else None
    return special or _general(name, accuracy)


def _general(name: str, accuracy: Accuracy) -> Row:
    return next(table[name] for table in _TABLES[accuracy] if name in table)


def _division(accuracy: Accuracy, literals: Literals) -> Row | None:
    divisor = literals[1]
    if divisor is None or not 2.0**-126 < abs(divisor) < 2.0**126:
        return None
    return dm.divide_by(divisor) if accuracy == "full" else dm.divide_by_narrow(divisor)


_LARGEST_PRODUCT: Mapping[Accuracy, int] = {"full": 5, "narrow": 8, "fast": 32}
"""The highest power that is computed by multiplication. Each squaring doubles the error."""


def _power(accuracy: Accuracy, literals: Literals) -> Row | None:
    """The row for an exponent that torch treats specially, or for a small positive integer; else None."""
    exponent = literals[1]
    if exponent is None:
        return None
    named = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}.get(exponent)
    if named:
        return lambda x, _: _general(named, accuracy)(x)
    if exponent == -2.0:
        return lambda x, _: _general("reciprocal", accuracy)(x * x)
    if 1 <= exponent <= _LARGEST_PRODUCT[accuracy] and exponent == int(exponent):
        return im.power(int(exponent))
    return None


def _softplus(accuracy: Accuracy, literals: Literals) -> Row | None:
    if literals[1] not in (1, 1.0):
        return None
    log_one_plus = dm.log1p_exp if accuracy == "full" else dm.log1p_exp_narrow
    vanishes = literals[2] is not None and literals[2] >= 15
    return am.softplus_by(log_one_plus) if vanishes else am.softplus_row(log_one_plus, None)


SPECIALISED: Mapping[str, Callable[[Accuracy, Literals], Row | None]] = {
    "div": _division,
    "pow": _power,
    "softplus": _softplus,
}
