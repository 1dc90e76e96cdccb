"""The primitives, one decorated function each. The body is the meaning in PyTorch, the signature gives the arity, the
docstring is the documentation, and the decorator's arguments are further properties. A provider has one row for each.

Called on tensors or numbers these functions are plain PyTorch. In an epilogue they are parsed and never called.
Operands broadcast by NumPy's rule. NaN behaves as in PyTorch.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch

Value: TypeAlias = Any
"""A tensor or a number. In an epilogue: a value of the graph."""

Function = TypeVar("Function", bound=Callable[..., Any])
"""A decorated function keeps its signature for type checkers and editors."""

_OfNumbers = Literal["arithmetic", "subtract", "floating", "divide", "power", "same", "compare"]
KindRule = Literal[_OfNumbers, "logic", "bits", "integer", "select", "random"]

Error = Literal["carried", "added", "amplified"]
"""How the relative error of a result follows from the relative errors of the arguments. *carried*: it is at most their
sum. *added*: it is at most their sum and the error of an approximation. *amplified*: it may be any multiple of them: a
sum may cancel, an exponential multiplies the error by its argument, and a comparison or a rounding is a step."""


@dataclass(frozen=True)
class Primitive:
    """One row of the table. No field has a default, so that a new primitive has to state each of them."""

    name: str
    arity: int
    rule: KindRule
    """How the kind of the result follows from those of the arguments."""
    meaning: Callable[..., Any]
    """The meaning on tensors."""
    on_host: Callable[..., Any]
    """The meaning on Python numbers."""
    commutative: bool
    """Whether its two arguments may change places."""
    error: Error
    """How errors of the arguments appear in the result."""
    costly: bool
    """Whether a GPU issues few of its instructions per cycle: then sharing its value gains more than a fast form."""
    may_fail: bool
    """Whether `on_host` may raise. An integer that is too large for a float does not count."""
    symbol: str | None
    """The binary operator of Python, if there is one."""


PRIMITIVES: dict[str, Primitive] = {}


def _on_numbers(meaning: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """`meaning` on Python numbers, as 0-d tensors: floats become float64, bools masks and ints integers."""

    def host(*numbers: Any) -> Any:
        dtypes = (torch.float64 if isinstance(n, float) else None for n in numbers)
        return meaning(*(torch.tensor(n, dtype=d, device="cpu") for n, d in zip(numbers, dtypes, strict=True))).item()

    return host


def primitive(
    rule: KindRule,
    *,
    commutative: bool,
    error: Error,
    costly: bool,
    may_fail: bool,
    host: Callable[..., Any] | None = None,
    symbol: str | None = None,
) -> Callable[[Function], Function]:
    """Register a row; see `Primitive`. Without `host`, numbers are computed as PyTorch computes 0-d tensors."""

    def register(meaning: Function) -> Function:
        on_host = host or _on_numbers(meaning)

        @functools.wraps(meaning)
        def function(*args: Any, **named: Any) -> Any:
            values = (*args, *named.values())
            if any(isinstance(value, torch.Tensor) for value in values):
                return meaning(*args, **named)
            return on_host(*args, **named)

        name = meaning.__name__
        arity = meaning.__code__.co_argcount
        PRIMITIVES[name] = Primitive(name, arity, rule, meaning, on_host, commutative, error, costly, may_fail, symbol)
        return function  # type: ignore[return-value]  # the signature of `meaning`

    return register


def _tensors(*values: Any) -> tuple[torch.Tensor, ...]:
    """The values as tensors. A number becomes a 0-d tensor of a dtype that does not promote the other tensors."""
    like = next(value for value in values if isinstance(value, torch.Tensor))
    return tuple(_as_tensor(value, like) for value in values)


def _as_tensor(value: Any, like: torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    widens = isinstance(value, float) and not like.dtype.is_floating_point
    dtype = torch.get_default_dtype() if widens else like.dtype
    if isinstance(value, int) and not isinstance(value, bool) and like.dtype == torch.bool:
        dtype = torch.int64
    return torch.full((), value, dtype=dtype, device=like.device)  # torch.tensor cannot be traced


# --- arithmetic ------------------------------------------------------------------------------------------------


@primitive(
    "arithmetic", commutative=True, error="amplified", costly=False, may_fail=False, host=operator.add, symbol="+"
)
def add(x: Value, y: Value) -> Value:
    """x + y."""
    return x + y


@primitive(
    "subtract", commutative=False, error="amplified", costly=False, may_fail=False, host=operator.sub, symbol="-"
)
def sub(x: Value, y: Value) -> Value:
    """x - y; a mask is refused on either side, as by PyTorch."""
    return x - y


@primitive("arithmetic", commutative=True, error="carried", costly=False, may_fail=False, host=operator.mul, symbol="*")
def mul(x: Value, y: Value) -> Value:
    """x * y. A mask times a number keeps the number where the mask holds."""
    return x * y


@primitive("divide", commutative=False, error="added", costly=True, may_fail=True, host=operator.truediv, symbol="/")
def div(x: Value, y: Value) -> Value:
    """x / y, a float also for two integers."""
    return x / y


@primitive(
    "integer", commutative=False, error="amplified", costly=False, may_fail=True, host=operator.floordiv, symbol="//"
)
def floor_divide(x: Value, y: Value) -> Value:
    """x // y for integers, rounded towards minus infinity."""
    return x // y


@primitive("integer", commutative=False, error="amplified", costly=False, may_fail=True, host=operator.mod, symbol="%")
def remainder(x: Value, y: Value) -> Value:
    """x % y for integers, with the sign of y."""
    return x % y


@primitive("power", commutative=False, error="amplified", costly=True, may_fail=True, host=operator.pow, symbol="**")
def pow(x: Value, y: Value) -> Value:  # noqa: A001 - the field's name
    """x ** y. An integer base takes a non-negative integer literal as exponent, or becomes a float."""
    return x**y


@primitive("arithmetic", commutative=False, error="carried", costly=False, may_fail=False, host=operator.neg)
def neg(x: Value) -> Value:
    """-x."""
    return -x


@primitive("arithmetic", commutative=False, error="carried", costly=False, may_fail=False, host=operator.abs)
def abs(x: Value) -> Value:  # noqa: A001 - the field's name
    """The absolute value."""
    return torch.abs(x)


@primitive("arithmetic", commutative=False, error="amplified", costly=False, may_fail=False)
def sign(x: Value) -> Value:
    """-1, 0 or 1; 0 for NaN."""
    return torch.sign(x)


@primitive("arithmetic", commutative=False, error="amplified", costly=False, may_fail=False)
def multiply_add(x: Value, y: Value, z: Value) -> Value:
    """x * y + z."""
    return x * y + z


@primitive("arithmetic", commutative=True, error="carried", costly=False, may_fail=False)
def maximum(x: Value, y: Value) -> Value:
    """The larger of the two; NaN where either is NaN."""
    return _beyond(torch.maximum, "min", x, y)


@primitive("arithmetic", commutative=True, error="carried", costly=False, may_fail=False)
def minimum(x: Value, y: Value) -> Value:
    """The smaller of the two; NaN where either is NaN."""
    return _beyond(torch.minimum, "max", x, y)


def _beyond(function: Callable[..., torch.Tensor], side: str, x: Value, y: Value) -> torch.Tensor:
    """Beside a number a clamp: a tensor that equals its bound has all of the gradient, as in PyTorch."""
    x, y = (x, y) if isinstance(x, torch.Tensor) else (y, x)
    tensors = [isinstance(x, torch.Tensor), isinstance(y, torch.Tensor)]
    return torch.clamp(x, **{side: y}) if tensors == [True, False] else function(*_same_dtype(x, y))


def _same_dtype(*values: Value) -> tuple[torch.Tensor, ...]:
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in _tensors(*values)))
    return tuple(tensor.to(dtype) for tensor in _tensors(*values))


@primitive("arithmetic", commutative=False, error="carried", costly=False, may_fail=False)
def clip(x: Value, min: Value, max: Value) -> Value:  # noqa: A002 - torch's parameter names
    """min(max(x, min), max); NaN where any of the three is NaN."""
    return torch.clamp(*_same_dtype(x, min, max))


# --- roots, exponentials, trigonometry -------------------------------------------------------------------------


@primitive("floating", commutative=False, error="added", costly=True, may_fail=False)
def sqrt(x: Value) -> Value:
    """The square root; NaN below zero."""
    return torch.sqrt(x)


@primitive("floating", commutative=False, error="added", costly=True, may_fail=False)
def rsqrt(x: Value) -> Value:
    """1 / sqrt(x)."""
    return torch.rsqrt(x)


@primitive("floating", commutative=False, error="added", costly=True, may_fail=False)
def reciprocal(x: Value) -> Value:
    """1 / x."""
    return torch.reciprocal(x)


@primitive("floating", commutative=False, error="amplified", costly=True, may_fail=False)
def exp(x: Value) -> Value:
    """e to the x."""
    return torch.exp(x)


@primitive("floating", commutative=False, error="amplified", costly=True, may_fail=False)
def exp2(x: Value) -> Value:
    """2 to the x."""
    return torch.exp2(x)


@primitive("floating", commutative=False, error="amplified", costly=True, may_fail=False)
def log(x: Value) -> Value:
    """The natural logarithm; -inf at zero, NaN below."""
    return torch.log(x)


@primitive("floating", commutative=False, error="amplified", costly=True, may_fail=False)
def log2(x: Value) -> Value:
    """The logarithm to base two."""
    return torch.log2(x)


@primitive("floating", commutative=False, error="amplified", costly=True, may_fail=False)
def log1p(x: Value) -> Value:
    """log(1 + x), accurate near zero."""
    return torch.log1p(x)


@primitive("floating", commutative=False, error="amplified", costly=True, may_fail=False)
def sin(x: Value) -> Value:
    """The sine of x in radians."""
    return torch.sin(x)


@primitive("floating", commutative=False, error="amplified", costly=True, may_fail=False)
def cos(x: Value) -> Value:
    """The cosine of x in radians."""
    return torch.cos(x)


@primitive("floating", commutative=False, error="amplified", costly=True, may_fail=False)
def tan(x: Value) -> Value:
    """The tangent of x in radians."""
    return torch.tan(x)


@primitive("floating", commutative=False, error="amplified", costly=True, may_fail=False)
def atan2(x: Value, y: Value) -> Value:
    """The angle of the point (y, x) in radians: the arc tangent of x / y, in the quadrant that their signs say."""
    return torch.atan2(*_same_dtype(x, y))


@primitive("floating", commutative=False, error="added", costly=True, may_fail=False)
def tanh(x: Value) -> Value:
    """The hyperbolic tangent."""
    return torch.tanh(x)


@primitive("floating", commutative=False, error="added", costly=True, may_fail=False)
def erf(x: Value) -> Value:
    """The error function."""
    return torch.erf(x)


# --- rounding --------------------------------------------------------------------------------------------------


@primitive("same", commutative=False, error="amplified", costly=False, may_fail=True, host=math.floor)
def floor(x: Value) -> Value:
    """The largest integer not above x: a float of a float, an integer as it is."""
    return torch.floor(x)


@primitive("same", commutative=False, error="amplified", costly=False, may_fail=True, host=math.ceil)
def ceil(x: Value) -> Value:
    """The smallest integer not below x: a float of a float, an integer as it is."""
    return torch.ceil(x)


@primitive("same", commutative=False, error="amplified", costly=False, may_fail=True, host=builtins.round)
def round(x: Value) -> Value:  # noqa: A001 - the field's name
    """The nearest integer, halves to even: a float of a float, an integer as it is."""
    return torch.round(x)


# --- comparisons and masks -------------------------------------------------------------------------------------


@primitive("compare", commutative=True, error="amplified", costly=False, may_fail=False, host=operator.eq, symbol="==")
def eq(x: Value, y: Value) -> Value:
    """x == y, a mask."""
    return x == y


@primitive("compare", commutative=True, error="amplified", costly=False, may_fail=False, host=operator.ne, symbol="!=")
def ne(x: Value, y: Value) -> Value:
    """x != y, a mask."""
    return x != y


@primitive("compare", commutative=False, error="amplified", costly=False, may_fail=False, host=operator.lt, symbol="<")
def lt(x: Value, y: Value) -> Value:
    """x < y, a mask."""
    return x < y


@primitive("compare", commutative=False, error="amplified", costly=False, may_fail=False, host=operator.le, symbol="<=")
def le(x: Value, y: Value) -> Value:
    """x <= y, a mask."""
    return x <= y


@primitive("compare", commutative=False, error="amplified", costly=False, may_fail=False, host=operator.gt, symbol=">")
def gt(x: Value, y: Value) -> Value:
    """x > y, a mask."""
    return x > y


@primitive("compare", commutative=False, error="amplified", costly=False, may_fail=False, host=operator.ge, symbol=">=")
def ge(x: Value, y: Value) -> Value:
    """x >= y, a mask."""
    return x >= y


@primitive("logic", commutative=True, error="amplified", costly=False, may_fail=False, symbol="&")
def logical_and(x: Value, y: Value) -> Value:
    """Both masks hold; written x & y."""
    return x & y


@primitive("logic", commutative=True, error="amplified", costly=False, may_fail=False, symbol="|")
def logical_or(x: Value, y: Value) -> Value:
    """Either mask holds; written x | y."""
    return x | y


@primitive("logic", commutative=False, error="amplified", costly=False, may_fail=False)
def logical_not(x: Value) -> Value:
    """The mask does not hold; written ~x."""
    return torch.logical_not(x)


@primitive(
    "select",
    commutative=False,
    error="carried",
    costly=False,
    may_fail=False,
    host=lambda condition, x, y: x if condition else y,
)
def where(condition: Value, x: Value, y: Value) -> Value:
    """x where the mask holds, else y. The branch not taken is dropped, NaN included."""
    if not isinstance(condition, torch.Tensor):
        condition = torch.full((), bool(condition), device=(x if isinstance(x, torch.Tensor) else y).device)
    return torch.where(condition, x, y)
