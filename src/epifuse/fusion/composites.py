"""Functions that are written in the epilogue language. The parser inlines their bodies.

Called on tensors they are plain PyTorch. Formulas and parameters are those of PyTorch's function of the same name, or
of the source that a docstring names.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from epifuse.fusion.activation import floor_power_of_two, sigmoid
from epifuse.fusion.forms import (
    cast,
    chunk,
    extent,
    full_like,
    gather,
    index_along,
    linear_index,
    squeeze,
    unflatten,
    unsqueeze,
)
from epifuse.fusion.literals import LastExtent, Positive, checked, in_float32, rounded_once
from epifuse.fusion.primitives import Value, abs, exp, log1p, maximum, minimum, rsqrt, sqrt, where
from epifuse.fusion.reduction import DimArgument, amax, amin, log_softmax, mean, sum

_INFINITY = math.inf
_LAST = 2**31 - 1
_LEAST_POWER = 2.0**-126


def isnan(x: Value) -> Value:
    """A mask: where x is NaN."""
    return x != x


def isinf(x: Value) -> Value:
    """A mask: where x is infinite."""
    return abs(x) == _INFINITY


def isfinite(x: Value) -> Value:
    """A mask: where x is neither infinite nor NaN."""
    return abs(x) < _INFINITY


def nan_to_num(x: Value, nan: Value = 0.0, posinf: Value = None, neginf: Value = None) -> Value:
    """x with NaN replaced by `nan`, and infinities by `posinf` and `neginf` or else by the limits of x's dtype.

    In an epilogue x is float32, so its limits are those of float32, which become infinite in an output of 16 bits. To
    have the limits of the output write `x.to(torch.bfloat16).nan_to_num()`.
    """
    high = torch.finfo(x.dtype).max if posinf is None else posinf
    low = torch.finfo(x.dtype).min if neginf is None else neginf
    return where(x != x, nan, where(x == _INFINITY, high, where(x == -_INFINITY, low, x)))


def zeros_like(x: Value, *, dtype: torch.dtype | None = None) -> Value:
    """0 in the shape of x."""
    return full_like(x, 0, dtype=dtype)


def ones_like(x: Value, *, dtype: torch.dtype | None = None) -> Value:
    """1 in the shape of x."""
    return full_like(x, 1, dtype=dtype)


def masked_fill(x: Value, mask: Value, value: Value) -> Value:
    """`value` where the mask holds, x elsewhere."""
    return where(mask, value, x)


def clamp_min(x: Value, min: Value) -> Value:  # noqa: A002 - torch's parameter name
    """x, or `min` where x is smaller. NaN stays NaN."""
    return maximum(x, min)


def clamp_max(x: Value, max: Value) -> Value:  # noqa: A002 - torch's parameter name
    """x, or `max` where x is larger. NaN stays NaN."""
    return minimum(x, max)


@rounded_once
def lerp(x: Value, end: Value, weight: Value) -> Value:
    """x + weight (end - x), computed from the end that is nearer, as PyTorch does."""
    # With a product in each branch, the gradient of the one not taken would be 0 * inf = NaN for an infinite step.
    is_near = abs(weight) < 0.5
    return where(is_near, x, end) + where(is_near, weight, weight - 1.0) * (end - x)


@rounded_once
def addcmul(x: Value, tensor1: Value, tensor2: Value, *, value: Value = 1) -> Value:
    """x + value tensor1 tensor2."""
    return x + value * tensor1 * tensor2


@rounded_once
def addcdiv(x: Value, tensor1: Value, tensor2: Value, *, value: Value = 1) -> Value:
    """x + value tensor1 / tensor2."""
    return x + value * tensor1 / tensor2


@rounded_once
def glu(x: Value, dim: int = -1) -> Value:
    """The first half of x along `dim`, times the sigmoid of the second half."""
    first, second = chunk(x, 2, dim)
    return first * sigmoid(second)


@rounded_once
def logaddexp(x: Value, y: Value) -> Value:
    """log(exp(x) + exp(y)), without overflow."""
    largest = maximum(x, y)
    distance = where(x == y, 0.0, abs(x - y))  # of equal infinities too
    return largest + log1p(exp(-distance))


@rounded_once
def var(
    x: Value, dim: DimArgument = None, unbiased: Value = None, keepdim: bool = False, *, correction: Value = 1
) -> Value:
    """The sum of the squared distances from the mean, divided by the number of elements minus `correction`."""
    centred = x - mean(x, dim=dim, keepdim=True)
    left = extent(x, dim) - (correction if unbiased is None else 1 if unbiased else 0)
    return sum(centred * centred, dim=dim, keepdim=keepdim) / (left if left > 0 else 0)


@rounded_once
def std(
    x: Value, dim: DimArgument = None, unbiased: Value = None, keepdim: bool = False, *, correction: Value = 1
) -> Value:
    """The square root of `var`."""
    # Where all elements are equal the derivative of sqrt is infinite; PyTorch's of std is 0.
    squared = var(x, dim, unbiased, keepdim, correction=correction)
    return where(squared == 0, 0.0, sqrt(where(squared == 0, 1.0, squared)))


@checked
@rounded_once
def rms_norm(x: Value, normalized_shape: LastExtent, weight: Value = None, eps: Value = None) -> Value:
    """x divided by the root mean square of its last dim, times `weight`.

    `normalized_shape` is the extent of that dim, such as `(64,)` or `x.shape[-1:]`. `eps` is added to the mean; it is
    the machine epsilon of x's dtype where none is given.
    """
    (width,) = normalized_shape
    least = torch.finfo(x.dtype).eps if eps is None else eps
    whole = unflatten(x, -1, (width,))  # refused where x has another extent
    normed = whole * rsqrt(mean(whole * whole, dim=-1, keepdim=True) + least)
    return normed if weight is None else normed * weight


@checked
@rounded_once
def layer_norm(
    x: Value, normalized_shape: LastExtent, weight: Value = None, bias: Value = None, eps: Value = 1e-05
) -> Value:
    """x minus the mean of its last dim, divided by the root of the variance plus `eps`, times `weight`, plus `bias`.

    `normalized_shape` is the extent of the last dim, such as `(64,)` or `x.shape[-1:]`.
    """
    (width,) = normalized_shape
    whole = unflatten(x, -1, (width,))  # refused where x has another extent
    centred = whole - mean(whole, dim=-1, keepdim=True)
    normed = centred * rsqrt(mean(centred * centred, dim=-1, keepdim=True) + eps)
    scaled = normed if weight is None else normed * weight
    return scaled if bias is None else scaled + bias


def argmax(x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    """The first place along `dim` of the maximum, or of NaN where there is one; int64. Without `dim`, in all of x."""
    return _first(x, amax(x, dim=dim, keepdim=True), dim, keepdim)


def argmin(x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    """The first place along `dim` of the minimum, or of NaN where there is one; int64. Without `dim`, in all of x."""
    return _first(x, amin(x, dim=dim, keepdim=True), dim, keepdim)


@checked
@rounded_once
def cross_entropy(
    x: Value,
    target: Value,
    weight: Literal[None] = None,
    size_average: Literal[None] = None,
    ignore_index: Value = -100,
    reduce: Literal[None] = None,
    reduction: Literal["none", "mean", "sum"] = "mean",
    label_smoothing: Value = 0.0,
) -> Value:
    """`F.cross_entropy` of logits (M, N) and target (M,), the index of the class of each row, without class weights.

    Rows whose target is `ignore_index` have the loss 0, and the mean does not count them. With `label_smoothing` s the
    target class has the probability 1 - s, and s is distributed equally over all classes. The loss of a row is
    undefined if its target is neither a class nor `ignore_index`. In batched logits (L, M, N) the classes are the last
    dim, unlike in PyTorch, and target is (L, M). For class weights multiply the result of `reduction="none"` by them.
    """
    counts, chances = unsqueeze(target, -1) != ignore_index, log_softmax(x, dim=-1)
    right = -_of_target(chances, target, counts)
    every = -mean(chances, dim=-1, keepdim=True)
    losses = right + label_smoothing * (every - right) if label_smoothing != 0 else right
    return _of_rows(losses, counts, reduction)


@checked
@rounded_once
def nll_loss(
    x: Value,
    target: Value,
    weight: Literal[None] = None,
    size_average: Literal[None] = None,
    ignore_index: Value = -100,
    reduce: Literal[None] = None,
    reduction: Literal["none", "mean", "sum"] = "mean",
) -> Value:
    """`F.nll_loss` of log-probabilities (M, N) and target (M,); see `cross_entropy`."""
    counts = unsqueeze(target, -1) != ignore_index
    return _of_rows(-_of_target(x, target, counts), counts, reduction)


@checked
@in_float32
def block_scale(largest: Value, most: Positive = 448.0, rounding: Literal["none", "up", "floor"] = "none") -> Value:
    """The scale by which a block is divided before it is stored in a dtype whose largest number is `most`.

    It is `largest`, the largest magnitude of the block, divided by `most`, and at least 2^-126. It is 1 for a block of
    zeros. `rounding` makes it a power of two, which torch.float8_e8m0fnu holds, and whose derivative is 0. "up" takes
    the smallest power that is not below it. "floor" takes 2^(floor(log2(largest)) - floor(log2(most))), which is the
    rule of the OCP Microscaling Formats specification 1.0, section 6.3; the largest values then saturate. NaN and
    infinity are kept; in e8m0 both are NaN. The scale is float32 also for tensors of 16 bits. Raises `ValueError` if
    `most` is not positive, and for another `rounding`.
    """
    x = largest if rounding == "floor" else largest / most
    below = floor_power_of_two(x)
    up = where(below < x, below * 2.0, below)
    power = below * 2.0 ** -math.floor(math.log2(most)) if rounding == "floor" else up
    return where(largest == 0, 1.0, maximum(x if rounding == "none" else power, _LEAST_POWER))


def _of_target(x: Value, target: Value, counts: Value) -> Value:
    return gather(x, -1, where(counts, unsqueeze(target, -1), 0))


def _of_rows(losses: Value, counts: Value, reduction: Literal["none", "mean", "sum"]) -> Value:
    kept = where(counts, losses, 0.0)
    # Counted in the shape of the losses: beside heads the target alone has none that fits accum.
    total = sum(kept) / (sum(where(counts, full_like(losses, 1.0), 0.0)) if reduction == "mean" else 1)
    return squeeze(kept, -1) if reduction == "none" else total


def _first(x: Value, value: Value, dim: int | None, keepdim: bool) -> Value:
    place = linear_index(x) if dim is None else index_along(x, dim)
    return cast(amin(where((x == value) | (x != x), place, _LAST), dim=dim, keepdim=keepdim), torch.int64)
