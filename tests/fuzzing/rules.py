"""What the generator has to know about operations: bounds of exact results, and domains for smooth data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fuzzing.values import Facts

Rule = Callable[..., Facts]


def _either(*args: Facts) -> Facts:
    return Facts(max(a.bound for a in args), min(a.step for a in args), any(a.rounded for a in args))


def _add(a: Facts, b: Facts) -> Facts:
    return Facts(a.bound + b.bound, min(a.step, b.step))


def _mul(a: Facts, b: Facts) -> Facts:
    return Facts(a.bound * b.bound, a.step * b.step)


def _whole(a: Facts) -> Facts:
    return Facts(a.bound + 1, max(a.step, 1.0))


# The facts of the result from those of the arguments, with exact data. Other operations are drawn for smooth data only.
EXACT: Mapping[str, Rule] = {
    "add": _add,
    "sub": _add,
    "mul": _mul,
    "div": lambda a, b: Facts(max(a.bound, 1.0) / b.step, 2.0**-20, True),
    "reciprocal": lambda a: Facts(1.0 / a.step, 2.0**-20, True),
    "sqrt": lambda a: Facts(max(a.bound, 1.0), 2.0**-20, True),
    "floor_divide": lambda a, b: Facts(a.bound + 1),
    "remainder": lambda a, b: Facts(b.bound),
    "pow": lambda a, b: Facts(a.bound**b.bound, a.step**b.bound),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), lambda a, b: Facts(2 * (a.bound + b.bound) + 1)),
    "bitwise_not": _whole,
    "bitwise_left_shift": lambda a, b: Facts(a.bound * 2.0**b.bound),
    "bitwise_right_shift": lambda a, b: Facts(a.bound + 1),
    "neg": _either,
    "abs": _either,
    "sign": lambda a: Facts(1.0),
    "multiply_add": lambda a, b, c: _add(_mul(a, b), c),
    "maximum": _either,
    "minimum": _either,
    "clip": _either,
    "floor": _whole,
    "ceil": _whole,
    "round": _whole,
    "where": lambda c, a, b: _either(a, b),
    "identity": _either,
    "square": lambda a: _mul(a, a),
    "relu": _either,
    "relu6": lambda a: Facts(6.0, a.step, a.rounded),
    "squared_relu": lambda a: _mul(a, a),
    "hardtanh": lambda a, low, high: _either(a, low, high),
    "leaky_relu": lambda a, slope: _either(a, _mul(a, slope)),
    "prelu": lambda a, slope: _either(a, _mul(a, slope)),
    "threshold": lambda a, at, value: _either(a, value),
    "drelu": lambda dy, x: _either(dy, Facts(0.0)),
    **dict.fromkeys(
        ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"), lambda *a: Facts(1)
    ),
}
SELECTING = frozenset(
    {"neg", "abs", "sign", "maximum", "minimum", "clip", "floor", "ceil", "round", "where", "identity", "relu"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "amax", "amin", "absmax", "any", "all"}
)
"""Operations that give equal bits for arguments of equal bits, also for rounded arguments."""

# Patterns that map arguments into the domain where a function is finite and well conditioned. With smooth data one use
# in ten leaves them out.
DOMAIN: Mapping[str, tuple[str, ...]] = {
    "sqrt": ("abs({}) + 0.25",),
    "rsqrt": ("abs({}) + 0.5",),
    "log": ("abs({}) + 0.25",),
    "log2": ("abs({}) + 0.25",),
    "log1p": ("abs({})",),
    "reciprocal": ("abs({}) + 0.5",),
    "div": ("{}", "abs({}) + 0.5"),
    "pow": ("abs({}) + 0.5", "{}"),
    "exp": ("clip({}, -6.0, 6.0)",),
    "exp2": ("clip({}, -6.0, 6.0)",),
    "tan": ("clip({}, -1.25, 1.25)",),
    "atan2": ("{}", "abs({}) + 0.5"),
    "tanhshrink": ("abs({}) + 0.5",),
    "logsumexp": ("clip({}, -30.0, 30.0)",),
    "prod": ("1.0 + clip({}, -1.0, 1.0) / 64.0",),
}
GUARDED_ALWAYS = frozenset({"floor_divide", "remainder", "bitwise_left_shift", "bitwise_right_shift"})

# The largest smooth result, from the bounds of the arguments. Other operations grow no faster than their arguments.
SMOOTH: Mapping[str, Rule] = {
    "add": _add,
    "sub": _add,
    "mul": _mul,
    "multiply_add": lambda a, b, c: _add(_mul(a, b), c),
    "div": lambda a, b: Facts(a.bound * 2),
    "reciprocal": lambda a: Facts(2.0),
    "rsqrt": lambda a: Facts(2.0),
    "pow": lambda a, b: Facts((a.bound + 1) ** min(b.bound, 3.0)),
    "exp": lambda a: Facts(404.0),
    "exp2": lambda a: Facts(64.0),
    "square": lambda a: _mul(a, a),
    "squared_relu": lambda a: _mul(a, a),
    "snake": lambda a, slope: Facts(a.bound + 4.0),
    "elu": lambda a, alpha: Facts(max(a.bound, alpha.bound)),
    "expm1": lambda a: Facts(404.0),
    "prelu": lambda a, slope: Facts(a.bound * max(slope.bound, 1.0)),
    "leaky_relu": lambda a, slope: Facts(a.bound * max(slope.bound, 1.0)),
    "dsilu": lambda dy, x: Facts(dy.bound * 2),
    "dgelu_erf": lambda dy, x: Facts(dy.bound * 2),
    "dgelu_tanh": lambda dy, x: Facts(dy.bound * 2),
    "remainder": lambda a, b: Facts(b.bound),
    "tan": lambda a: Facts(4.0),
    "atan2": lambda a, b: Facts(4.0),
}


def smooth(name: str, args: list[Facts]) -> Facts:
    """An estimate of the bound of a smooth result."""
    rule = SMOOTH.get(name)
    return Facts(rule(*args).bound if rule else max(a.bound for a in args), rounded=True)
