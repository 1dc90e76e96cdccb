"""Reductions: one decorated function each, plain PyTorch on tensors. `dim` counts over the value's own rank, as torch.

Without `dim` a reduction gives one number for the whole result. Results are float32 for floats (float64 with a float64
accumulator), int64 for sums of integers and masks, and are values that may be used again. `softmax` and `log_softmax`
are written in the epilogue language on top of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from epifuse.fusion.literals import rounded_once
from epifuse.fusion.primitives import Function, Value, exp, log

DimArgument = int | tuple[int, ...] | None
KindRule = Literal["sum", "squares", "float", "ordered", "mask"]
OfOne = Literal["itself", "square", "size", "truth"]
OfEqual = tuple[Literal["times", "plus", "power"], Callable[[int], float]]


class Merge(NamedTuple):
    """How reductions of parts are merged, and the neutral element. For a mean or a norm that is its underlying sum."""

    how: Literal["sum", "product", "largest", "smallest", "any", "all", "exponentials"]
    neutral: float


_SUM, _PRODUCT, _EXPONENTIALS = Merge("sum", 0.0), Merge("product", 1.0), Merge("exponentials", -math.inf)
_LARGEST, _LARGEST_SIZE, _SMALLEST = Merge("largest", -math.inf), Merge("largest", 0.0), Merge("smallest", math.inf)
_ANY, _ALL = Merge("any", 0.0), Merge("all", 1.0)


@dataclass(frozen=True)
class Combine:
    """One row of the table. No field has a default, so that a new reduction has to state each of them."""

    name: str
    meaning: Callable[..., torch.Tensor]
    """The meaning on tensors."""
    rule: KindRule
    """The kind of the result: `sum` widens integers and masks to int64, `squares` widens integers, `float` accepts
    floats only, `ordered` keeps the kind, and `mask` makes a mask."""
    merge: Merge
    has_identity: bool
    """Whether the reduction of no elements has a value."""
    of_one: OfOne
    """The reduction of one element."""
    of_equal: OfEqual
    """How the reduction of `count` equal floats follows from that of one."""
    of_ones: Callable[[int], float] | None
    """The reduction of `count` ones among zeros; None if it depends on the number of zeros too."""


REDUCTIONS: dict[str, Combine] = {}


def along(name: str, x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Reduce x along `dims`, and keep them with extent one. Without dims each element is reduced by itself; PyTorch
    would reduce over all dims."""
    meaning = REDUCTIONS[name].meaning
    made: torch.Tensor = meaning(x, tuple(dims), True) if dims else meaning(x[..., None], (-1,), False)
    return made


def reduction(
    rule: KindRule,
    merge: Merge,
    *,
    has_identity: bool,
    of_one: OfOne,
    of_equal: OfEqual,
    of_ones: Callable[[int], float] | None,
) -> Callable[[Function], Function]:
    """Register a row; see `Combine`."""

    def register(function: Function) -> Function:
        name = function.__name__
        REDUCTIONS[name] = Combine(name, function, rule, merge, has_identity, of_one, of_equal, of_ones)
        return function

    return register


def _none_is(nothing: float) -> OfEqual:
    """For a reduction of equal floats that is the reduction of one of them; `nothing` replaces it for no elements."""
    return "times", lambda count: 1.0 if count else nothing


def _log(count: int) -> float:
    return math.log(count) if count else -math.inf


def _one_if_any(count: int) -> float:
    return min(float(count), 1.0)


def _dims(x: torch.Tensor, dim: DimArgument) -> tuple[int, ...]:
    if dim is None:
        return tuple(range(x.dim()))
    return (dim,) if isinstance(dim, int) else tuple(dim)


@reduction("sum", _SUM, has_identity=True, of_one="itself", of_equal=("times", float), of_ones=float)
def sum(x: Value, dim: DimArgument = None, keepdim: bool = False) -> Value:  # noqa: A001 - the field's name
    """The sum."""
    return torch.sum(x, _dims(x, dim), keepdim)


@reduction("sum", _PRODUCT, has_identity=True, of_one="itself", of_equal=("power", float), of_ones=None)
def prod(x: Value, dim: DimArgument = None, keepdim: bool = False) -> Value:
    """The product; 1 for no elements. The product of integers is taken modulo 2^64."""
    for d in sorted((d % x.dim() for d in _dims(x, dim) or range(x.dim())), reverse=True):
        x = torch.prod(x, d, keepdim)
    return x if x.is_floating_point() else x.to(torch.int64)


@reduction("float", _SUM, has_identity=True, of_one="itself", of_equal=_none_is(math.nan), of_ones=None)
def mean(x: Value, dim: DimArgument = None, keepdim: bool = False) -> Value:
    """The mean; NaN for no elements."""
    return torch.mean(x, _dims(x, dim), keepdim)


@reduction("ordered", _LARGEST, has_identity=False, of_one="itself", of_equal=_none_is(0.0), of_ones=_one_if_any)
def amax(x: Value, dim: DimArgument = None, keepdim: bool = False) -> Value:
    """The maximum, NaN if any is NaN (torch.amax; what CUTLASS calls amax is `absmax`)."""
    return torch.amax(x, _dims(x, dim), keepdim)


@reduction("ordered", _SMALLEST, has_identity=False, of_one="itself", of_equal=_none_is(0.0), of_ones=None)
def amin(x: Value, dim: DimArgument = None, keepdim: bool = False) -> Value:
    """The minimum, NaN if any is NaN."""
    return torch.amin(x, _dims(x, dim), keepdim)


@reduction("ordered", _LARGEST_SIZE, has_identity=True, of_one="size", of_equal=_none_is(0.0), of_ones=_one_if_any)
def absmax(x: Value, dim: DimArgument = None, keepdim: bool = False) -> Value:
    """The largest absolute value; 0 for no elements. CUTLASS calls it amax."""
    if x.numel() == 0:
        return torch.sum(torch.abs(x), _dims(x, dim), keepdim, dtype=x.dtype)
    return torch.amax(torch.abs(x), _dims(x, dim), keepdim)


@reduction("squares", _SUM, has_identity=True, of_one="square", of_equal=("times", float), of_ones=float)
def sum_of_squares(x: Value, dim: DimArgument = None, keepdim: bool = False) -> Value:
    """The sum of x * x; the squares of integers are int64 too."""
    wide = x if x.is_floating_point() else x.to(torch.int64)
    return torch.sum(wide * wide, _dims(x, dim), keepdim)


@reduction("float", _SUM, has_identity=True, of_one="size", of_equal=("times", math.sqrt), of_ones=math.sqrt)
def norm(x: Value, dim: DimArgument = None, keepdim: bool = False) -> Value:
    """The Euclidean norm, sqrt(sum of x * x)."""
    return torch.linalg.vector_norm(x, 2, _dims(x, dim), keepdim)


@reduction("mask", _ANY, has_identity=True, of_one="truth", of_equal=_none_is(0.0), of_ones=None)
def any(x: Value, dim: DimArgument = None, keepdim: bool = False) -> Value:  # noqa: A001 - the field's name
    """True where any element is not zero."""
    return torch.any(x, _dims(x, dim), keepdim)


@reduction("mask", _ALL, has_identity=True, of_one="truth", of_equal=_none_is(1.0), of_ones=None)
def all(x: Value, dim: DimArgument = None, keepdim: bool = False) -> Value:  # noqa: A001 - the field's name
    """True where every element is not zero."""
    return torch.all(x, _dims(x, dim), keepdim)


@reduction(
    "float",
    _EXPONENTIALS,
    has_identity=True,
    of_one="itself",
    of_equal=("plus", _log),
    of_ones=None,
)
def logsumexp(x: Value, dim: DimArgument = None, keepdim: bool = False) -> Value:
    """log(sum(exp(x))) without overflow; -inf for no elements."""
    return torch.logsumexp(x, _dims(x, dim), keepdim)


def _as_torch(function: Function) -> Function:
    """Have `function` call PyTorch's function of the same name on floats. The derivative of that one does not compare
    elements with the largest one, which PyTorch's compiler may have rounded in another way."""
    own = getattr(torch, function.__name__)

    @functools.wraps(function)
    def call(x: Value, dim: DimArgument = -1) -> Value:
        return own(x, dim) if isinstance(dim, int) and x.is_floating_point() else function(x, dim)

    return call  # type: ignore[return-value]  # the same parameters


@_as_torch
@rounded_once
def softmax(x: Value, dim: DimArgument = -1) -> Value:
    """exp(x) / sum(exp(x)) along `dim`, without overflow."""
    shifted = exp(x - amax(x, dim=dim, keepdim=True))
    return shifted / sum(shifted, dim=dim, keepdim=True)


@_as_torch
@rounded_once
def log_softmax(x: Value, dim: DimArgument = -1) -> Value:
    """log(softmax(x, dim))."""
    shifted = x - amax(x, dim=dim, keepdim=True)
    return shifted - log(sum(exp(shifted), dim=dim, keepdim=True))
